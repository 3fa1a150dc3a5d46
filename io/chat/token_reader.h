// A template's tokens as its parsers read them: what comes next, what has to come, and the nodes that are made of it.
#pragma once
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

class TokenReader {
 protected:
  static constexpr int kMaxDepth =
      200;  // levels of expressions and statements, into which parsing and rendering recurse

  // name: as for lex(); it is kept as a reference.
  TokenReader(std::string_view source, const std::string& name) : name_(name), tokens_(lex(source, name)) {}

  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail("{}: line {}: {}", name_, peek().line, shortened(fmt::format(format, std::forward<Args>(args)...), 400));
  }

  // Counts the levels of recursion.
  class Level {
   public:
    explicit Level(TokenReader& reader);
    ~Level() { --reader_.level_; }
    Level(const Level&) = delete;

   private:
    TokenReader& reader_;
  };

  const Token& peek() const { return tokens_[at_]; }
  // The token after peek(), which is not the end.
  const Token& peek_second() const { return tokens_[at_ + 1]; }
  Token next() { return tokens_[at_].kind == Token::Kind::end ? tokens_[at_] : tokens_[at_++]; }
  // Takes the next token if it is this one.
  bool accept(Token::Kind, std::string_view text);
  bool accept_op(std::string_view text) { return accept(Token::Kind::op, text); }
  bool accept_name(std::string_view text) { return accept(Token::Kind::name, text); }
  bool accept_block(std::string_view word);  // {% and this word
  void expect(Token::Kind, std::string_view text, const char* what);
  void expect_op(std::string_view text);
  std::string take_name();
  static std::string shown(const Token&);

  NodePtr make(Node::Kind, std::string name = {}) const;
  // Adds a child, which may be null.
  void add(Node&, NodePtr child) const;
  // Notes that `child` is a level below the node.
  void deepen(Node&, const Node& child) const;
  template <class... Children>
  NodePtr make_of(Node::Kind kind, std::string name, Children&&... children) const {
    NodePtr node = make(kind, std::move(name));
    (add(*node, std::forward<Children>(children)), ...);
    return node;
  }

 private:
  const std::string& name_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int level_ = 0;
};

}  // namespace triad::chat
