// What --help prints: lines that fit the terminal, and of a long help what a user asks for.
#pragma once
#include <cstddef>
#include <string>

namespace triad {

// Breaks lines that are longer than `width` characters at blanks. A continuation begins below the description, which
// follows a line's name after two blanks and more.
std::string wrapped(const std::string& help, size_t width);
// The lines whose name (an option, a config key) contains the topic; throws UsageError if there are none.
std::string help_about(const std::string& help, const std::string& topic);

}  // namespace triad
