// What a model recalls, by where the needle lies and how long the sequence is: measured, and as a table, a CSV file, a
// picture.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "io/data/needle.h"

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
  // Header length,depth,samples,right,accuracy; a row a cell.
  std::string csv() const;
  // Self-contained, and a part of an HTML page just as well.
  std::string svg(const std::string& title) const;
};

inline constexpr const char* kNeedleCsv = "needle.csv";
inline constexpr const char* kNeedleSvg = "needle.svg";

// Of sequences of T tokens, one behind the other: the likeliest token at each position that has a target (not -1), in
// their order.
using Answers =
    std::function<std::vector<int32_t>(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t T)>;

struct NeedleQuestions {
  std::vector<int64_t> lengths;  // empty: an eighth, a quarter, half and all of the task's
  std::vector<double> depths;
  int64_t samples = 64, batch = 8;
};

// Every sample is a probe of its own (io/data/needle.h). The value's tokens stand in it, so that all of them are the
// likeliest ones exactly where greedy decoding would say them.
NeedleGrid measure_needles(const NeedleTask&, NeedleQuestions, const Answers&);

}  // namespace triad
