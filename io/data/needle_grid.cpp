#include "io/data/needle_grid.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numeric>

#include "engine/check.h"

namespace triad {

namespace {

std::string percent(double share, int digits) { return fmt::format("{:.{}f}%", 100 * share, digits); }

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<')
      out += "&lt;";
    else if (c == '&')
      out += "&amp;";
    else
      out += c;
  }
  return out;
}

// How many among `count` sequences have only correct answers.
int64_t count_right(std::span<const int32_t> targets, std::span<const int32_t> answers, int64_t count) {
  const auto length = static_cast<int64_t>(targets.size()) / count;
  int64_t right = 0, next = 0;
  for (int64_t s = 0; s < count; ++s) {
    bool all = true;
    for (int64_t i = s * length; i < (s + 1) * length; ++i)
      if (targets[i] >= 0) all = (answers[next++] == targets[i]) && all;
    right += all;
  }
  return right;
}

// A colour scale from white (nothing recalled) to dark blue. It is steepest near 1, so that 90% and 100% are distinct.
struct Colour {
  int red, green, blue;
};
Colour colour_of(double share) {
  constexpr Colour kNone = {247, 244, 238}, kAll = {8, 64, 129};
  const double x = share * share;
  const auto mix = [x](int a, int b) { return static_cast<int>(std::lround(a + (b - a) * x)); };
  return {mix(kNone.red, kAll.red), mix(kNone.green, kAll.green), mix(kNone.blue, kAll.blue)};
}

}  // namespace

double NeedleGrid::lowest() const {
  return static_cast<double>(*std::min_element(right.begin(), right.end())) / static_cast<double>(samples);
}

double NeedleGrid::overall() const {
  return static_cast<double>(std::accumulate(right.begin(), right.end(), int64_t{0})) /
         static_cast<double>(samples * static_cast<int64_t>(right.size()));
}

std::string needle_file(NeedleKind kind, const std::string& extension) {
  return fmt::format("needle{}.{}", kind == NeedleKind::keys ? "" : fmt::format("_{}", word_of(kind)), extension);
}

std::string needle_title(NeedleKind kind, const std::string& attention) {
  return kind == NeedleKind::keys ? "Needles recalled, attention: " + attention
                                  : fmt::format("Task {} answered, attention: {}", word_of(kind), attention);
}

std::string NeedleGrid::pairs_text() const { return pairs > 0 ? fmt::format(", pairs in each: {}", pairs) : ""; }

std::string NeedleGrid::table() const {
  std::string out = fmt::format("{:>8}", "depth");
  for (const int64_t length : lengths) out += fmt::format("{:>10}", length);
  for (size_t d = 0; d < depths.size(); ++d) {
    out += fmt::format("\n{:>8}", percent(depths[d], 0));
    for (size_t l = 0; l < lengths.size(); ++l) out += fmt::format("{:>10}", percent(accuracy(d, l), 1));
  }
  return out + "\n";
}

std::string NeedleGrid::csv() const {
  std::string out = "length,depth,samples,right,accuracy,pairs\n";
  for (size_t l = 0; l < lengths.size(); ++l)
    for (size_t d = 0; d < depths.size(); ++d)
      out += fmt::format("{},{},{},{},{:.6f},{}\n", lengths[l], depths[d], samples, right[d * lengths.size() + l],
                         accuracy(d, l), pairs);
  return out;
}

// Styles are written as `style` attributes, because an enclosing HTML page's rules do not override these.
std::string NeedleGrid::svg(const std::string& title) const {
  constexpr int kCellWidth = 64, kCellHeight = 26, kLeft = 62, kTop = 44, kRight = 12, kBottom = 44;
  constexpr const char* kText = "font:12px system-ui,sans-serif;fill:{}";
  const int columns = static_cast<int>(lengths.size()), rows = static_cast<int>(depths.size());
  const int width = std::max(kLeft + columns * kCellWidth + kRight, 300), height = kTop + rows * kCellHeight + kBottom,
            middle = kLeft + columns * kCellWidth / 2;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" role=\"img\" "
      "style=\"max-width:{0}px;height:auto;background:#ffffff\">\n<title>{2}</title>\n",
      width, height, escaped(title));
  const auto text = [&](int x, int y, const char* anchor, const char* colour, const std::string& words) {
    out += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"{}\" style=\"{}\">{}</text>\n", x, y, anchor,
                       fmt::format(fmt::runtime(kText), colour), escaped(words));
  };
  constexpr const char *kDark = "#1b1f24", *kFaint = "#59636e";
  text(8, 18, "start", kDark, title);
  text(8, kTop - 8, "start", kFaint, "depth");
  for (int d = 0; d < rows; ++d) {
    const int y = kTop + d * kCellHeight;
    text(kLeft - 8, y + 17, "end", kFaint, percent(depths[static_cast<size_t>(d)], 0));
    for (int l = 0; l < columns; ++l) {
      const double share = accuracy(static_cast<size_t>(d), static_cast<size_t>(l));
      const Colour c = colour_of(share);
      const int x = kLeft + l * kCellWidth;
      out += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" style=\"fill:#{:02x}{:02x}{:02x}\"/>\n", x,
                         y, kCellWidth - 2, kCellHeight - 2, c.red, c.green, c.blue);
      text(x + kCellWidth / 2 - 1, y + 17, "middle", share > 0.7 ? "#ffffff" : kDark, percent(share, 1));
    }
  }
  for (int l = 0; l < columns; ++l)
    text(kLeft + l * kCellWidth + kCellWidth / 2 - 1, height - kBottom + 16, "middle", kFaint,
         std::to_string(lengths[static_cast<size_t>(l)]));
  text(middle, height - 10, "middle", kFaint,
       fmt::format("tokens a sequence; {} sequences a cell{}", samples, pairs_text()));
  return out + "</svg>\n";
}

NeedleGrid measure_needles(const NeedleTask& task, NeedleQuestions q, const Answers& answers) {
  if (q.lengths.empty())
    for (const int64_t part : {8, 4, 2, 1})
      if (part == 1 || task.seq_len / part >= shortest_probe(task, q.pairs)) q.lengths.push_back(task.seq_len / part);
  const auto in_order = [](auto& list) {
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
  };
  in_order(q.lengths);
  in_order(q.depths);
  for (const int64_t length : q.lengths)
    needle_probe(task, length, 0, 0, q.pairs);  // throws now, before any measurement, if the length is too short
  for (const double depth : q.depths) needle_probe(task, q.lengths.back(), depth, 0, q.pairs);
  NeedleGrid grid{.lengths = q.lengths, .depths = q.depths, .samples = q.samples, .pairs = q.pairs, .right = {}};
  grid.right.assign(q.lengths.size() * q.depths.size(), 0);
  for (size_t l = 0; l < q.lengths.size(); ++l)
    for (size_t d = 0; d < q.depths.size(); ++d)
      for (int64_t begin = 0; begin < q.samples; begin += q.batch) {
        const int64_t count = std::min(q.batch, q.samples - begin);
        std::vector<int32_t> tokens, targets;
        for (int64_t s = begin; s < begin + count; ++s) {
          const NeedleProbe probe = needle_probe(task, q.lengths[l], q.depths[d], static_cast<uint64_t>(s), q.pairs);
          tokens.insert(tokens.end(), probe.tokens.begin(), probe.tokens.end());
          targets.insert(targets.end(), probe.targets.begin(), probe.targets.end());
        }
        grid.right[d * q.lengths.size() + l] += count_right(targets, answers(tokens, targets, q.lengths[l]), count);
      }
  return grid;
}

}  // namespace triad
