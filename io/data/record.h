// A record of a JSONL file, one a line: its text, and which of it the model learns to predict.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace triad {

struct Record {
  struct Part {
    std::string text;
    bool learned = true;
  };
  std::vector<Part> parts;  // one after the other they are the document
  bool masked = false;      // of a kind whose documents have a loss mask

  bool empty() const;  // no text at all
};

// Reads a line, which is a JSON object with one of:
//   text: a string, all of which is learned; any other keys are ignored;
//   prompt, completion: strings, of which the completion is learned;
//   messages: a list of {role, content}, each written as role, line feed, content, line feed. Learned are the contents
//     of the role `assistant` and the line feeds after them.
// Anything else throws an Error that begins with `place`, the file and line.
Record parse_record(std::string_view line, const std::string& place);

}  // namespace triad
