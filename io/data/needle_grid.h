// Measures how often a model answers a needle task, by the needle's depth and the sequence's length, and writes the
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
  int64_t samples = 0;           // probes per depth and length
  int64_t pairs = 0;             // NeedleQuestions::pairs
  // [depth][length]: probes whose answers, to all questions, argmax predicted to the last token.
  std::vector<int64_t> right;

  double accuracy(size_t depth, size_t length) const {
    return static_cast<double>(right[depth * lengths.size() + length]) / static_cast<double>(samples);
  }
  double lowest() const;
  double overall() const;  // the mean over depths and lengths

  // ", pairs in each: 16", or nothing if sequences have them as densely as in training.
  std::string pairs_text() const;
  std::string table() const;
  // CSV text with the columns length,depth,samples,right,accuracy,pairs and one row per depth and length.
  std::string csv() const;
  // An SVG picture without external references, which also works inside an HTML page.
  std::string svg(const std::string& title) const;
};

// A task's CSV and SVG file names in a run's folder: needle.csv for keys, else such as needle_copy.csv.
std::string needle_file(NeedleKind, const std::string& extension);
// The picture's title: the task, and the model's attention (config key model.attention).
std::string needle_title(NeedleKind, const std::string& attention);

// A function that runs the model: maps concatenated T-token sequences to the argmax predictions at all positions with a
// target (not -1), in order.
using Answers =
    std::function<std::vector<int32_t>(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t T)>;

struct NeedleQuestions {
  std::vector<int64_t> lengths;  // empty: 1/8, 1/4, 1/2 and 1 times the task's length, unless too short
  std::vector<double> depths;
  int64_t samples = 64, batch = 8;
  int64_t pairs = 0;  // needles in each sequence; 0: as densely as in training
};

// Measures every depth and length with `samples` probes (io/data/needle.h). A probe contains its own answers (teacher
// forcing), so all answer tokens are predicted correctly exactly if greedy decoding would produce them. A second
// question is asked after the right answer to the first.
NeedleGrid measure_needles(const NeedleTask&, NeedleQuestions, const Answers&);

}  // namespace triad
