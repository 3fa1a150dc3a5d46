// For messages about an unknown word (a verb, an option, a config key): the known word that was probably meant.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// The least number of letters inserted, removed, replaced or swapped with their neighbour that turn a into b.
int edit_distance(std::string_view a, std::string_view b);

// `; did you mean "x"?`, to be appended to a message; empty where no known word is near. A word is near if few of its
// letters differ, or if it begins with what was typed. Case does not count, and '-' counts as '_'. before: printed in
// front of the word.
std::string did_you_mean(std::string_view typed, const std::vector<std::string>& known, std::string_view before = "");

}  // namespace triad
