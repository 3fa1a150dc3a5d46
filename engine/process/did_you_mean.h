// For messages about an unknown word (a verb, an option, a config key): suggests the known word that is most similar.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// Damerau-Levenshtein distance (optimal string alignment): the fewest letters to insert, remove, replace or swap with a
// neighbour in order to turn a into b.
int edit_distance(std::string_view a, std::string_view b);

// Returns text to append to a message: `; did you mean "x"?`, or nothing if no known word is similar. A word is similar
// if few letters differ or if it begins with `typed`. Case is ignored, and '-' equals '_'. before: printed in front of
// the suggested word, for example "train.".
std::string did_you_mean(std::string_view typed, const std::vector<std::string>& known, std::string_view before = "");

}  // namespace triad
