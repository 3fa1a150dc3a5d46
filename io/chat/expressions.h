// Parses the expressions of a template, by recursive descent; parser.cpp parses the statements around them.
#pragma once
#include <initializer_list>
#include <string>
#include <string_view>

#include "io/chat/token_reader.h"

namespace triad::chat {

class ExpressionParser : protected TokenReader {
 protected:
  using TokenReader::TokenReader;

  // Several expressions with commas are a tuple. with_condition: whether `a if b else c` may be one.
  NodePtr tuple_or_expression(bool with_condition = true);
  NodePtr expression();
  // The | filters, tests and calls that follow `node`.
  NodePtr filters(NodePtr node);

 private:
  // Operands joined by any of these operators, from left to right.
  template <class Operand>
  NodePtr joined(Token::Kind, std::initializer_list<std::string_view> operators, Operand&&);
  NodePtr either();
  NodePtr negation();
  NodePtr comparison();
  NodePtr sum();
  NodePtr unary(bool with_filters);
  NodePtr constant(Value) const;
  NodePtr primary();
  NodePtr parenthesized();
  NodePtr named();
  NodePtr number();
  NodePtr postfix(NodePtr);
  NodePtr subscript(NodePtr);
  NodePtr call(Node::Kind, std::string name, NodePtr subject);
  NodePtr test(NodePtr subject);
};

}  // namespace triad::chat
