// Recognizes JSON, and what is meant to be JSON, by the beginning of a text.
#pragma once
#include <cstddef>

namespace triad {

class TextHead;

enum class JsonShape {
  none,           // text; prose and code may begin with a bracket, a quote or a number, too
  lines,          // objects, one a line; other lines may be damaged
  single,         // a single object, in one line
  several_lines,  // an object in several lines
  array,          // an array in several lines, or cut
  array_lines,    // arrays, one a line, or only one
  values,         // strings, numbers or words such as null, one a line
  unclear         // an object in a line longer than TextHead::kMostBytes
};

// What begins at `begin`, the first nonblank character:
//   an object, if a brace and a quoted key do, also a damaged one or one as Python prints it;
//   an array, if it holds objects, or nothing but arrays and such values follow it. It may be cut, hold NaN, end in a
//     comma; in "[1984] is a year" and `["Hello," she said]` other words follow;
//   values, if every line holds one of them and nothing else, unless there is only a number or a word.
// Lines with an object each are `lines` also after a first line that is none, and after up to a few lines of anything,
// such as what a program prints before its first record.
JsonShape json_shape(TextHead& head, size_t begin);

}  // namespace triad
