// Errors in red and warnings in yellow, for a person at a terminal.
#pragma once
#include <string>

namespace triad {

enum class Tone { error, warning };
// Whether lines to `fd` may have colours: it is a terminal, and neither NO_COLOR (https://no-color.org) nor a
// launcher's rank nor TERM=dumb is in the environment. A launcher gives its ranks terminals, whose output may go to a
// file.
bool has_colours(int fd);
// The text, in colour where has_colours().
std::string toned(int fd, Tone, const std::string& text);
// Prints "triad: TEXT" to stderr, below a progress line if there is one.
void print_problem(Tone, const std::string& text);
inline void print_warning(const std::string& text) { print_problem(Tone::warning, text); }

}  // namespace triad
