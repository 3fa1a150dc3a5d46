// A chat template: the subset of Jinja that the templates of chat models use, rendered as transformers renders it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/chat/syntax.h"
#include "io/chat/value.h"

namespace triad::chat {

struct Rendered {
  // Bytes that one message has written; message: its index, -1 if it is not known.
  struct Span {
    size_t begin, end;
    int64_t message;
  };
  std::string text;
  std::vector<Span> turns;      // not empty: what a loop's iteration over a message wrote
  std::vector<Span> generated;  // what is within {% generation %}
};

class Template {
 public:
  // name: the template's name for messages. Throws an Error that names what is not supported, with its line.
  Template(std::string_view source, std::string name);

  // Renders with these variables; `messages` is the list whose turns are noted. Rendering ends after a number of steps
  // that depends on input_bytes, the size of what the variables hold. Throws an Error with name and line. Thread-safe.
  Rendered render(const Dict& variables, size_t input_bytes) const;
  bool marks_generated() const { return marks_generated_; }  // whether there is a {% generation %}
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::shared_ptr<const std::vector<NodePtr>> body_;
  bool marks_generated_ = false;
};

}  // namespace triad::chat
