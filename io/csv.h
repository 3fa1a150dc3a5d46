// CSV files of a run: one header line, then rows whose first column is the step. A row is written whole and at once.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "io/file.h"

namespace triad {

class CsvFile {
 public:
  // resume_step < 0: a new file with this header. Otherwise rows of later steps, and a last line that a killed run left
  // unfinished, are cut, and rows are appended; no file there yet makes a new one. Damaged lines are left out, each
  // with a warning on stderr that names file and line: rows that do not begin with a step, or have more or fewer
  // columns than most lines, and a header whose rows have this one's columns. A table of other columns is an Error, and
  // is not changed.
  CsvFile(const std::string& path, const std::string& header, int64_t resume_step = -1);

  // One row, without its newline. As many columns as the header, else an Error.
  void row(std::string_view text);

 private:
  size_t columns_;
  AppendFile file_;
};

// Of a table that this run may not write itself, and whose header may be another: the same cut. None there is fine.
void cut_csv(const std::string& path, int64_t step);

}  // namespace triad
