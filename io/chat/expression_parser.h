// The parser of a template's expressions, and of the tokens between them: parser.cpp derives the parser of statements.
#pragma once
#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/chat/lexer.h"
#include "io/chat/syntax.h"

namespace triad::chat {

// levels of expressions and statements, into which parsing and rendering recurse
inline constexpr int kMaxDepth = 200;

class ExpressionParser {
 public:
  // The template's name must outlive the parser.
  ExpressionParser(std::string_view source, const std::string& name) : name_(name), tokens_(lex(source, name)) {}

 protected:
  using Kind = Token::Kind;

  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail("{}: line {}: {}", name_, peek().line, shortened(fmt::format(format, std::forward<Args>(args)...), 400));
  }

  // Counts the levels of recursion.
  class Level {
   public:
    explicit Level(ExpressionParser& parser) : parser_(parser) {
      if (++parser_.level_ > kMaxDepth) parser_.refuse("it nests deeper than {} levels", kMaxDepth);
    }
    ~Level() { --parser_.level_; }
    Level(const Level&) = delete;

   private:
    ExpressionParser& parser_;
  };

  const Token& peek(size_t ahead = 0) const { return tokens_[at_ + ahead]; }
  Token next() { return tokens_[at_].kind == Kind::end ? tokens_[at_] : tokens_[at_++]; }
  bool accept(Kind kind, std::string_view text) {
    const bool is = peek().is(kind, text);
    if (is) ++at_;
    return is;
  }
  bool accept_op(std::string_view text) { return accept(Kind::op, text); }
  bool accept_name(std::string_view text) { return accept(Kind::name, text); }
  static std::string shown(const Token&);
  void expect(Kind kind, std::string_view text, const char* what) {
    if (!accept(kind, text)) refuse("{} is needed, not {}", what, shown(peek()));
  }
  void expect_op(std::string_view text) {
    if (!accept_op(text)) refuse("`{}` is needed, not {}", text, shown(peek()));
  }
  std::string take_name() {
    if (peek().kind != Kind::name) refuse("a name is needed, not {}", shown(peek()));
    return next().text;
  }

  NodePtr make(Node::Kind kind, std::string name = {}) const {
    auto node = std::make_unique<Node>();
    node->kind = kind;
    node->line = peek().line;
    node->name = std::move(name);
    return node;
  }
  // Adds a child, which may be null.
  void add(Node& node, NodePtr child) const {
    if (child) deepen(node, *child);
    node.children.push_back(std::move(child));
  }
  void deepen(Node& node, const Node& child) const {
    node.depth = std::max(node.depth, child.depth + 1);
    if (node.depth > kMaxDepth) refuse("an expression of more than {} levels", kMaxDepth);
  }
  template <class... Children>
  NodePtr make_of(Node::Kind kind, std::string name, Children&&... children) const {
    NodePtr node = make(kind, std::move(name));
    (add(*node, std::forward<Children>(children)), ...);
    return node;
  }

  NodePtr tuple_or_expression(bool with_condition = true);
  NodePtr expression();
  // The filters, tests and calls that may follow a value.
  NodePtr filters(NodePtr node);

 private:
  // By falling precedence, as in Jinja's parser.
  template <class Operand>
  NodePtr joined(Kind kind, std::initializer_list<std::string_view> operators, Operand&& operand);
  NodePtr either();
  NodePtr negation();
  NodePtr comparison();
  NodePtr sum();
  NodePtr unary(bool with_filters);
  NodePtr constant(Value value) const;
  NodePtr primary();
  NodePtr parenthesized();
  NodePtr named();
  NodePtr number();
  NodePtr postfix(NodePtr node);
  NodePtr subscript(NodePtr node);
  NodePtr call(Node::Kind kind, std::string name, NodePtr subject);
  NodePtr test(NodePtr subject);

  const std::string& name_;
  std::vector<Token> tokens_;
  size_t at_ = 0;  // the next token
  int level_ = 0;
};

}  // namespace triad::chat
