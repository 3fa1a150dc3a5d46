// For messages about an unknown word (a verb, an option, a config key): suggests the most similar known word.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// Damerau-Levenshtein distance (optimal string alignment): the minimal number of letters inserted, removed, replaced or
// swapped with a neighbour that turns a into b.
int edit_distance(std::string_view a, std::string_view b);

// Text to append to a message: `; did you mean "x"?`, or nothing if no known word is similar. A word is similar if few
// letters differ or if it begins with `typed`. Case is ignored, and '-' equals '_'. before: printed in front of the
// word.
std::string did_you_mean(std::string_view typed, const std::vector<std::string>& known, std::string_view before = "");

}  // namespace triad
