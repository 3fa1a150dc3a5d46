// Text files of a run that grow with each step and are not CSV (io/csv.h): cuts them back to a step on a resume.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace triad {

// The part of a text that belongs to steps up to `step`. step_of: the step of a line, nullopt for a line of the same
// step as the previous one. An incomplete last line is dropped.
using StepOfLine = std::function<std::optional<int64_t>(std::string_view line)>;
std::string text_until(std::string_view text, int64_t step, const StepOfLine& step_of);

// The number between two texts at the beginning of a line: 12 for ("step 12: ...", "step ", ":").
std::optional<int64_t> number_between(std::string_view line, std::string_view before, std::string_view after);

}  // namespace triad
