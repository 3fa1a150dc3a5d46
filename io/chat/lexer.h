// A chat template's text to tokens, as Jinja does with trim_blocks and lstrip_blocks, which transformers sets.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace triad::chat {

struct Token {
  enum class Kind { text, block_begin, block_end, output_begin, output_end, name, integer, real, string, op, end };
  Kind kind = Kind::end;
  std::string text = {};  // text, name, operator, digits; a string's value
  int line = 1;

  bool is(Kind of, std::string_view with) const { return kind == of && text == with; }
};

// name: the template's name for messages. Throws an Error with name and line.
std::vector<Token> lex(std::string_view source, const std::string& name);

}  // namespace triad::chat
