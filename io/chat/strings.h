// Python's string methods. Texts are UTF-8.
#pragma once
#include <string>
#include <string_view>

#include "io/chat/builtins.h"

namespace triad::chat {

// Removes characters at the beginning (left) and the end (right): white space, or if they are not empty, these.
std::string strip(std::string_view text, std::string_view characters, bool left, bool right);
std::string stripped_characters(const Value&);  // strip()'s argument, which may be none
// most: how many are replaced; below 0: all.
std::string replaced(std::string_view text, std::string_view old, std::string_view with, int64_t most, Budget&);
// Of ASCII. Others throw an Error that names `what`.
std::string lower_case(std::string_view text, const char* what);
std::string upper_case(std::string_view text, const char* what);
std::string capitalized(std::string_view text);

Value call_string_method(const std::string& text, const std::string& name, Arguments, Budget&);

}  // namespace triad::chat
