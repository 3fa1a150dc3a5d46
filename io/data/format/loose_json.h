// JSON as programs write it that are not strict about it, read only to find its end.
#pragma once
#include <cstddef>
#include <string_view>

namespace triad {

struct LooseValue {
  enum class Ending {
    whole,
    cut,    // the text ends within the value
    broken  // the text at `end` cannot follow in a value
  };
  Ending ending;
  size_t end;
};

// Reads the value that begins at text[at]. Beyond JSON it may hold NaN and infinities, Python's words and quotes, a
// comma before a closing bracket, and any characters but line feeds in strings.
LooseValue read_loose_json(std::string_view text, size_t at);

// End position of the object or array at text[at], found by its brackets alone, whatever is between them; npos if the
// text ends before. in_string: the text ends within a string.
size_t end_by_brackets(std::string_view text, size_t at, bool& in_string);

}  // namespace triad
