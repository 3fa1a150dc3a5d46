// UTF-8, and text that is safe to print.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace triad {

// Length in bytes of the longest prefix that is valid UTF-8 (no surrogates, no overlong forms, at most U+10FFFF).
size_t utf8_prefix(std::string_view text);
// Whether the text is the beginning of one UTF-8 character, which more bytes could complete.
bool is_cut_character(std::string_view text);
// Length in bytes of the character that begins at text[at]. The text is UTF-8.
size_t character_bytes(std::string_view text, size_t at);
uint32_t point_at(std::string_view text, size_t at);  // code point of the character at text[at]
// Index of the character before text[at]; at is above 0.
size_t previous_character(std::string_view text, size_t at);
// Makes any bytes, as in file names, safe for a terminal or a message: one line, without control sequences. Control
// characters, characters that change the direction of a line, and bytes that are not UTF-8 become \xhh.
std::string printable(std::string_view text);
// The first `bytes` bytes of a text as printable() returns them, followed by "..." if the text is longer.
std::string shortened(std::string_view text, size_t bytes = 200);
// A text of several lines, with printable() applied to each line.
std::string printable_lines(std::string_view text);
// The text as a word of a shell command, quoted where needed.
std::string shell_word(const std::string& text);

}  // namespace triad
