// Unicode text: valid UTF-8, normal forms, text that is safe to print, and the alphabet in which byte-level BPE
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
// True if the text is a character that is cut, which more bytes could complete.
bool is_cut_character(std::string_view text);
// Length in bytes of the character that begins at text[at]; text is UTF-8.
size_t character_bytes(std::string_view text, size_t at);
uint32_t point_at(std::string_view text, size_t at);  // its code point

// Any bytes, as in file names, for a terminal or a message: one line, without control sequences. Control characters,
// characters that change the direction of a line, and bytes that are not UTF-8 become \xhh.
std::string printable(std::string_view text);
// The same for the first `bytes` bytes, followed by "..." if the text is longer.
std::string shortened(std::string_view text, size_t bytes = 200);
// The same per line, for messages of several lines.
std::string printable_lines(std::string_view text);
// A word of a shell command, quoted where needed.
std::string shell_word(const std::string& text);

enum class NormalForm { nfc, nfd, nfkc, nfkd };
std::string normalize(NormalForm, std::string_view text);  // text: UTF-8

// GPT-2's alphabet writes each byte as a printable character: 188 bytes as themselves, the others as U+0100 and
// following, in order. unspell_bytes returns nullopt if a character is not in the alphabet.
std::string spell_byte(uint8_t byte);
std::optional<std::string> unspell_bytes(std::string_view text);

// Characters of a general category ("L", "Lu", "Nd", ...) that Unicode 15 and 16 added, as ranges for a PCRE2 class.
std::string new_characters(std::string_view category);

}  // namespace triad
