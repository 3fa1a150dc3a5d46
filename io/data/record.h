// A record in a JSONL file, one a line: its text, and which part of it the model learns to predict.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "io/chat/chat_options.h"

namespace triad {

struct Record {
  struct Part {
    std::string text;
    bool learned = true;
  };
  std::vector<Part> parts;  // one after the other they are the document
  bool masked = false;      // whether documents of this kind have a loss mask
  bool chat = false;        // whether it is a conversation, whose parts are tokenized as one text

  bool empty() const;  // no text at all
};

// Whether a line holds no record: nothing but white space (Python's str.isspace) and a byte-order mark.
bool is_blank_line(std::string_view line);

// Whether a line is a record with `messages`, as parse_record() reads it. False if it is no record.
bool is_conversation(std::string_view line);

// Reads a line, which is a JSON object with one of:
//   text: a string, all learned;
//   prompt, completion: strings; the completion is learned;
//   messages: a list of {role, content, ...}, written by the chat template (io/chat/chat_format.h), with `tools` and
//     `chat_template_kwargs` of the record. Learned is what chat.learn says, without the answers of messages with
//     weight 0 or train false.
// Other keys are ignored with any value (also NaN, Infinity, 1e400, half a surrogate pair), except those that in
// known formats change what is learned or what comes before it: these throw unless they are null, empty or false.
// Anything else throws an Error that begins with `place`, the file and line. chat.format may not be null.
Record parse_record(std::string_view line, const std::string& place, const ChatOptions& chat);

}  // namespace triad
