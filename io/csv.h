// A run's CSV files: one header line, then rows whose first column is the step. Each row is one write(2).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "io/file.h"

namespace triad {

class CsvFile {
 public:
  // resume_step < 0: creates the file with this header.
  // resume_step >= 0: keeps the file's rows up to that step and appends to them; a missing file is created. Removed are
  // rows for later steps, an unfinished last line, and damaged lines, each with a warning on stderr that names file and
  // line. A row is damaged if it does not begin with a step, or if its column count is not the file's most frequent
  // one. A damaged header is rewritten. A table with other columns throws an Error and stays unchanged.
  CsvFile(const std::string& path, const std::string& header, int64_t resume_step = -1);

  // Appends one row, given without its newline. Throws if its column count differs from the header's.
  void row(std::string_view text);

 private:
  size_t columns_;
  AppendFile file_;
};

// Removes the rows for steps after `step`, and damaged lines, from a file that this run does not write and whose header
// may differ from this run's. The file may be absent.
void cut_csv(const std::string& path, int64_t step);

}  // namespace triad
