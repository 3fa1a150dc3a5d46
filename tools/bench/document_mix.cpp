#include "tools/bench/document_mix.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "engine/rng.h"

namespace triad {

namespace {

constexpr std::string_view kLognormal = "lognormal:";

[[noreturn]] void malformed(const std::string& mix) {
  fail_usage(
      "--documents: {} is not NxL, NxL+NxL or lognormal:MEAN:TOTAL[:SIGMA] with positive numbers, as 8x16384 or "
      "lognormal:1000:65536:1",
      mix);
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text)
    if (c == separator)
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

// A document or token count.
int64_t parse_count(const std::string& digits, const std::string& mix) {
  const auto n = parse_number<int64_t>(digits);
  if (!n || *n < 1 || *n >= int64_t{1} << 31) malformed(mix);
  return *n;
}

std::vector<int64_t> lognormal_lengths(const std::string& mix) {
  const std::vector<std::string> parts = split(std::string_view(mix).substr(kLognormal.size()), ':');
  if (parts.size() < 2 || parts.size() > 3) malformed(mix);
  const int64_t mean = parse_count(parts[0], mix), total = parse_count(parts[1], mix);
  const auto sigma = parts.size() == 3 ? parse_number<double>(parts[2]) : 1.0;
  if (!sigma || !(*sigma >= 0 && *sigma <= 10)) malformed(mix);
  const double mu = std::log(static_cast<double>(mean)) - *sigma * *sigma / 2;
  const Philox random(1, 4);
  std::vector<int64_t> lengths;
  int64_t left = total;
  for (uint64_t i = 0; left > 0; ++i) {
    const double drawn = std::min(std::exp(mu + *sigma * random.normal(i)), static_cast<double>(left));
    lengths.push_back(std::max<int64_t>(1, std::llround(drawn)));
    left -= lengths.back();
  }
  return lengths;
}

std::vector<int64_t> listed_lengths(const std::string& mix) {
  std::vector<int64_t> lengths;
  for (const std::string& term : split(mix, '+')) {
    const std::vector<std::string> sizes = split(term, 'x');
    if (sizes.size() != 2) malformed(mix);
    const int64_t count = parse_count(sizes[0], mix), length = parse_count(sizes[1], mix);
    if (static_cast<int64_t>(lengths.size()) + count >= int64_t{1} << 31) malformed(mix);
    lengths.insert(lengths.end(), static_cast<size_t>(count), length);
  }
  return lengths;
}

}  // namespace

std::vector<int32_t> mixed_bounds(const std::string& mix, int64_t B, int64_t T) {
  const std::vector<int64_t> lengths = mix.starts_with(kLognormal) ? lognormal_lengths(mix) : listed_lengths(mix);
  int64_t total = 0;
  for (const int64_t length : lengths) total += length;
  if (total != B * T)
    fail_usage("--documents: {} has {} tokens, and the shape has {} rows of {} tokens, {} in all", mix, total, B, T,
               B * T);
  std::vector<int32_t> bounds = {0};
  for (int64_t left : lengths)
    while (left > 0) {
      const int64_t begin = bounds.back(), end = std::min(begin + left, (begin / T + 1) * T);
      bounds.push_back(static_cast<int32_t>(end));
      left -= end - begin;
    }
  return bounds;
}

}  // namespace triad
