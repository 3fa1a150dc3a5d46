// Unicode text: checks for UTF-8, normal forms, text that is safe to print, and the alphabet in which byte-level BPE
// vocabularies write bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
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

// Makes any bytes, as in file names, safe for a terminal or a message: one line, without control sequences. Control
// characters, characters that change the direction of a line, and bytes that are not UTF-8 become \xhh.
std::string printable(std::string_view text);
// The first `bytes` bytes of a text as printable() returns them, followed by "..." if the text is longer.
std::string shortened(std::string_view text, size_t bytes = 200);
// A text of several lines, with printable() applied to each line.
std::string printable_lines(std::string_view text);
// The text as a word of a shell command, quoted where needed.
std::string shell_word(const std::string& text);

enum class NormalForm { nfc, nfd, nfkc, nfkd };
std::string normalize(NormalForm, std::string_view text);  // the text's normal form; the text must be UTF-8

// The alphabet of GPT-2's vocabulary files, which writes each byte as a printable character: 188 bytes as themselves,
// the others as U+0100 and following, in order. unspell_bytes returns nullopt if a character is not in the alphabet.
std::string spell_byte(uint8_t byte);
std::optional<std::string> unspell_bytes(std::string_view text);

// The characters of a general category ("L", "Lu", "Nd", ...) that Unicode 15 and 16 added, as ranges for a class of a
// PCRE2 pattern.
std::string new_characters(std::string_view category);

}  // namespace triad
