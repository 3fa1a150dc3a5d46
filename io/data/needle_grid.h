// Measures how much of the needle task a model recalls, by the needle's depth and the sequence's length, and writes the
// result as a table, a CSV file or a picture.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "io/data/needle.h"

namespace triad {

struct NeedleGrid {
  std::vector<int64_t> lengths;  // tokens per sequence, ascending
  std::vector<double> depths;    // 0 to 1, ascending
  int64_t samples = 0;           // number of probes per combination of depth and length
  // [depth][length]: number of probes whose value tokens were all predicted by argmax.
  std::vector<int64_t> right;

  double accuracy(size_t depth, size_t length) const {
    return static_cast<double>(right[depth * lengths.size() + length]) / static_cast<double>(samples);
  }
  double lowest() const;

  std::string table() const;
  // CSV text with the columns length,depth,samples,right,accuracy and one row per combination of depth and length.
  std::string csv() const;
  // An SVG picture without external references, which also works inside an HTML page.
  std::string svg(const std::string& title) const;
};

inline constexpr const char* kNeedleCsv = "needle.csv";
inline constexpr const char* kNeedleSvg = "needle.svg";

// A function that runs the model: maps concatenated sequences of T tokens to the argmax predictions at all positions
// with a target (not -1), in order.
using Answers =
    std::function<std::vector<int32_t>(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t T)>;

struct NeedleQuestions {
  std::vector<int64_t> lengths;  // sequence lengths; empty: 1/8, 1/4, 1/2 and all of the task's length
  std::vector<double> depths;
  int64_t samples = 64, batch = 8;
};

// Measures every combination of depth and length with `samples` probes (io/data/needle.h). A probe contains its own
// value (teacher forcing), so all value tokens are predicted correctly exactly if greedy decoding would produce the
// value.
NeedleGrid measure_needles(const NeedleTask&, NeedleQuestions, const Answers&);

}  // namespace triad
