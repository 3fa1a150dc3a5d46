#include "io/chat/token_reader.h"

#include <algorithm>

namespace triad::chat {

using Kind = Token::Kind;

TokenReader::Level::Level(TokenReader& reader) : reader_(reader) {
  if (++reader_.level_ > kMaxDepth) reader_.refuse("it nests deeper than {} levels", kMaxDepth);
}

bool TokenReader::accept(Kind kind, std::string_view text) {
  const bool is = peek().is(kind, text);
  if (is) ++at_;
  return is;
}

bool TokenReader::accept_block(std::string_view word) {
  if (peek().kind != Kind::block_begin || !peek_second().is(Kind::name, word)) return false;
  at_ += 2;
  return true;
}

void TokenReader::expect(Kind kind, std::string_view text, const char* what) {
  if (!accept(kind, text)) refuse("{} is needed, not {}", what, shown(peek()));
}

void TokenReader::expect_op(std::string_view text) {
  if (!accept_op(text)) refuse("`{}` is needed, not {}", text, shown(peek()));
}

std::string TokenReader::take_name() {
  if (peek().kind != Kind::name) refuse("a name is needed, not {}", shown(peek()));
  return next().text;
}

std::string TokenReader::shown(const Token& token) {
  switch (token.kind) {
    case Kind::end:
      return "the end";
    case Kind::text:
      return "text";
    case Kind::block_begin:
      return "{%";
    case Kind::block_end:
      return "%}";
    case Kind::output_begin:
      return "{{";
    case Kind::output_end:
      return "}}";
    case Kind::string:
      return fmt::format("the string \"{}\"", shortened(token.text, 40));
    default:
      return fmt::format("`{}`", shortened(token.text, 40));
  }
}

NodePtr TokenReader::make(Node::Kind kind, std::string name) const {
  auto node = std::make_unique<Node>();
  node->kind = kind;
  node->line = peek().line;
  node->name = std::move(name);
  return node;
}

void TokenReader::add(Node& node, NodePtr child) const {
  if (child) deepen(node, *child);
  node.children.push_back(std::move(child));
}

void TokenReader::deepen(Node& node, const Node& child) const {
  node.depth = std::max(node.depth, child.depth + 1);
  if (node.depth > kMaxDepth) refuse("an expression of more than {} levels", kMaxDepth);
}

}  // namespace triad::chat
