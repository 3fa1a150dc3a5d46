// How well a model recalls, by where the needle lies and how long the sequence is: as a table, as a CSV file, as a
// picture.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace triad {

struct NeedleGrid {
  std::vector<int64_t> lengths;  // tokens a sequence, ascending
  std::vector<double> depths;    // 0 to 1, ascending
  int64_t samples = 0;           // a cell
  std::vector<int64_t> right;    // [depth][length]: samples of which every token of the value was the likeliest

  double accuracy(size_t depth, size_t length) const {
    return static_cast<double>(right[depth * lengths.size() + length]) / static_cast<double>(samples);
  }
  double lowest() const;

  std::string table() const;
  // A file that a run's folder keeps: header kNeedleHeader, a row a cell.
  std::string csv() const;
  // Self-contained, and a part of an HTML page just as well.
  std::string svg(const std::string& title) const;
};

inline constexpr const char* kNeedleCsv = "needle.csv";
inline constexpr const char* kNeedleSvg = "needle.svg";

// Throws an Error that names the file, and the cell or the line, unless it is a whole grid. No lengths: no such file.
NeedleGrid read_needle_grid(const std::string& path);

}  // namespace triad
