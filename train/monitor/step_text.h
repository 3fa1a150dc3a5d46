// A run's text files that grow with each step and aren't CSV (for CSV see io/csv.h): a resume cuts them back to its
// step.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace triad {

// The part of a text that belongs to steps up to `step`. step_of(line) returns the line's step, or nullopt if the line
// belongs to the same step as the previous one. An incomplete last line is dropped.
using StepOfLine = std::function<std::optional<int64_t>(std::string_view line)>;
std::string text_until(std::string_view text, int64_t step, const StepOfLine& step_of);

// The number between the texts `before` and `after` where a line begins: 12 for the line "step 12: ..." with "step "
// and ":".
std::optional<int64_t> number_between(std::string_view line, std::string_view before, std::string_view after);

}  // namespace triad
