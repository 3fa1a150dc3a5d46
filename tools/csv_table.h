// A run's CSV and JSONL files, read back.
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>

namespace triad {

// The lines of a file; the last one, where a run is at work on it and has not ended it yet, is left out.
std::vector<std::string> whole_lines(const std::string& path);

// A CSV file of a run: numbers in columns that have a name, NaN where a field is empty. A row with more or fewer fields
// than the header, or whose step is no number, is left out, and any other field that is no number is NaN, each with a
// warning on stderr that names file and line.
class CsvTable {
 public:
  // No rows if the file is not there. Every column of `needed` has to be.
  CsvTable(const std::string& path, const std::vector<std::string>& needed);
  size_t size() const { return rows_.size(); }
  bool has(const std::string& column) const { return columns_.count(column) > 0; }
  const std::string& text(size_t row, const std::string& column) const { return rows_[row][columns_.at(column)]; }
  double number(size_t row, const std::string& column) const;

 private:
  std::string path_;
  std::map<std::string, size_t> columns_;
  std::vector<std::vector<std::string>> rows_;
  std::vector<size_t> lines_;          // of the rows, in the file
  mutable std::set<size_t> reported_;  // lines of which a warning has been printed
};

}  // namespace triad
