// What tokenizers need of Unicode: properties of characters, normal forms, case folding, and the alphabet in which
// byte-level BPE vocabularies write bytes. engine/process/text.h has UTF-8 itself.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// Number of bytes at a text's beginning that begin no UTF-8 character.
size_t invalid_prefix(std::string_view text);
// Whether a character has Unicode's property White_Space.
bool is_white_space(uint32_t point);
bool is_python_space(uint32_t point);  // what Python's str.isspace() and str.strip() take for white space
bool is_printable(uint32_t point);     // what Python's str.isprintable() does, which repr() writes as it is
// A text's length without the white space at its end, as Python's str.rstrip() removes it.
size_t length_without_trailing_space(std::string_view text);

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
