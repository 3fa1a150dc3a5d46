#include "train/monitor/step_text.h"

#include <charconv>
#include <limits>
#include <system_error>

namespace triad {

std::string text_until(std::string_view text, int64_t step, const StepOfLine& step_of) {
  std::string kept;
  // The current line's step; lines before the first step are always kept.
  int64_t now = std::numeric_limits<int64_t>::min();
  for (size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1)) {
    const std::string_view line = text.substr(0, end + 1);
    now = step_of(line).value_or(now);
    if (now <= step) kept += line;
  }
  return kept;
}

std::optional<int64_t> number_between(std::string_view line, std::string_view before, std::string_view after) {
  if (!line.starts_with(before)) return {};
  line.remove_prefix(before.size());
  int64_t number = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), number);
  line.remove_prefix(static_cast<size_t>(end - line.data()));
  return error == std::errc() && line.starts_with(after) ? std::optional(number) : std::nullopt;
}

}  // namespace triad
