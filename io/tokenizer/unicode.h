// Text at the level of Unicode: the runs of a text that are UTF-8, its normal forms, and the alphabet in which
// byte-level BPE vocabularies spell bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace triad {

// Bytes of the longest beginning of text that is UTF-8 (no surrogates, nothing overlong, none past U+10FFFF).
size_t utf8_prefix(std::string_view text);
// True if text is the beginning of a character that more bytes could complete.
bool is_cut_character(std::string_view text);
// Bytes of the character that begins at text[at]; text is UTF-8.
size_t character_bytes(std::string_view text, size_t at);
uint32_t point_at(std::string_view text, size_t at);  // its code

// Text of any bytes, as names in a file are, for a terminal or a message: on one line, and nothing that a terminal
// would obey. Characters stay whole; controls, characters that reverse a line's direction, and bytes that are no UTF-8,
// become \xHH.
std::string printable(std::string_view text);
// The same of its beginning.
std::string shortened(std::string_view text, size_t bytes = 200);
// The same line by line, for messages of several lines.
std::string printable_lines(std::string_view text);
// A word of a shell's command: in quotes where it needs them.
std::string shell_word(const std::string& text);

enum class NormalForm { nfc, nfd, nfkc, nfkd };
std::string normalize(NormalForm, std::string_view text);  // text is UTF-8

// GPT-2's alphabet: each byte is one printable character of at most two bytes; 188 stand for themselves, the others are
// U+0100 and on, in order. Nothing if a character of text is none of them.
std::string spell_byte(uint8_t byte);
std::optional<std::string> unspell_bytes(std::string_view text);

// Characters of a general category ("L", "Lu", "Nd", ...) that Unicode 15 and 16 added, as ranges of a PCRE2 class.
std::string new_characters(std::string_view category);

}  // namespace triad
