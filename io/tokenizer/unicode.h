// Unicode text: checks for UTF-8, normal forms, text that is safe to print, and the alphabet in which byte-level BPE
// vocabularies write bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// The length in bytes of the longest prefix that is valid UTF-8 (no surrogates, no overlong forms, at most U+10FFFF).
size_t utf8_prefix(std::string_view text);
// Whether the text begins one UTF-8 character, which more bytes could complete.
bool is_cut_character(std::string_view text);
// Length in bytes of the character that begins at text[at]. The text is UTF-8.
size_t character_bytes(std::string_view text, size_t at);
uint32_t point_at(std::string_view text, size_t at);  // code point at text[at]
// Index of the character before text[at]; at is above 0.
size_t previous_character(std::string_view text, size_t at);
// Whether a character has Unicode's property White_Space.
bool is_white_space(uint32_t point);
// A text's length without the white space at its end, as Python's str.rstrip() removes it.
size_t length_without_trailing_space(std::string_view text);

// Makes any bytes, as in file names, safe for a terminal or a message: one line, without control sequences. Control
// characters, characters that change a line's direction, and bytes that are not UTF-8 become \xhh.
std::string printable(std::string_view text);
// The first `bytes` bytes of a text as printable() returns them, followed by "..." if the text is longer.
std::string shortened(std::string_view text, size_t bytes = 200);
// Several lines, with printable() applied to each.
std::string printable_lines(std::string_view text);
// The text as a word in a shell command, quoted where needed.
std::string shell_word(const std::string& text);

enum class NormalForm { nfc, nfd, nfkc, nfkd };
std::string normalize(NormalForm, std::string_view text);  // the text's normal form; the text must be UTF-8

// The alphabet in GPT-2's vocabulary files, which writes each byte as a printable character: 188 bytes as themselves,
// the others as U+0100 and following, in order. unspell_bytes returns nullopt if a character is not in the alphabet.
std::string spell_byte(uint8_t byte);
std::optional<std::string> unspell_bytes(std::string_view text);

// The characters in a general category ("L", "Lu", "Nd", ...) that Unicode 15 and 16 added, as ranges for a class in a
// PCRE2 pattern.
std::string new_characters(std::string_view category);
// Whether the `tokenizers` library counts a character as part of a word, as Unicode 16 does: letters, digits, marks and
// connectors.
bool is_word(uint32_t point);

// The characters that a character becomes where case does not count: often itself, for U+00DF the two of ss.
std::vector<uint32_t> case_fold(uint32_t point);
// Whether a character folds to several, the first two being these, folded.
bool begins_case_fold(uint32_t first, uint32_t second);
// Whether Unicode 15 or 16 gave the character its upper or lower case.
bool is_newly_cased(uint32_t point);

}  // namespace triad
