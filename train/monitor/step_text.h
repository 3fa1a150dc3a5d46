// Text files of a run that grow step by step and are no tables (io/csv.h): what a resume keeps of them.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace triad {

// What of a text belongs to steps up to `step`. step_of: the step that a line begins, nothing for one that goes on with
// the line before it. A last line that a killed run left unfinished goes.
using StepOfLine = std::function<std::optional<int64_t>(std::string_view line)>;
std::string text_until(std::string_view text, int64_t step, const StepOfLine& step_of);

// The number that stands between these two at a line's beginning: ("step 12: ...", "step ", ":") is 12.
std::optional<int64_t> number_between(std::string_view line, std::string_view before, std::string_view behind);

}  // namespace triad
