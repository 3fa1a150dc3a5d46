// Reads a run's CSV and JSONL files, finished or still in progress.
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>

namespace triad {

// A file's lines without an incomplete last line, which a run may still be writing.
std::vector<std::string> whole_lines(const std::string& path);

// A CSV file with named columns. An empty field is NaN. A row whose field count differs from the header's, or whose
// step is not a number, is left out; any other field that is not a number is NaN. Both cause a warning on stderr with
// file and line.
class CsvTable {
 public:
  // A missing file counts as a table without rows. Throws an Error if the table lacks a `needed` column.
  CsvTable(const std::string& path, const std::vector<std::string>& needed);
  size_t size() const { return rows_.size(); }
  bool has(const std::string& column) const { return columns_.count(column) > 0; }
  const std::string& text(size_t row, const std::string& column) const { return rows_[row][columns_.at(column)]; }
  double number(size_t row, const std::string& column) const;

 private:
  std::string path_;
  std::map<std::string, size_t> columns_;
  std::vector<std::vector<std::string>> rows_;
  std::vector<size_t> lines_;          // line number of each row in the file
  mutable std::set<size_t> reported_;  // line numbers for which a warning has been printed
};

}  // namespace triad
