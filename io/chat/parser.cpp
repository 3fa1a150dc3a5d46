#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <iterator>
#include <system_error>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/chat/lexer.h"
#include "io/chat/syntax.h"

namespace triad::chat {

namespace {

using Kind = Token::Kind;
using Body = std::vector<NodePtr>;

constexpr int kMaxDepth = 200;  // levels of expressions and statements, into which parsing and rendering recurse

class Parser {
 public:
  Parser(std::string_view source, const std::string& name) : name_(name), tokens_(lex(source, name)) {}

  Body run() {
    Body body = statements({});
    if (peek().kind != Kind::end) refuse("{{% {} %}} has no beginning", tokens_[at_ + 1].text);
    return body;
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail("{}: line {}: {}", name_, peek().line, shortened(fmt::format(format, std::forward<Args>(args)...), 400));
  }

  // Counts the levels of recursion.
  class Level {
   public:
    explicit Level(Parser& parser) : parser_(parser) {
      if (++parser_.level_ > kMaxDepth) parser_.refuse("it nests deeper than {} levels", kMaxDepth);
    }
    ~Level() { --parser_.level_; }
    Level(const Level&) = delete;

   private:
    Parser& parser_;
  };

  const Token& peek() const { return tokens_[at_]; }
  Token next() { return tokens_[at_].kind == Kind::end ? tokens_[at_] : tokens_[at_++]; }
  bool accept(Kind kind, std::string_view text) {
    const bool is = peek().is(kind, text);
    if (is) ++at_;
    return is;
  }
  bool accept_op(std::string_view text) { return accept(Kind::op, text); }
  bool accept_name(std::string_view text) { return accept(Kind::name, text); }
  static std::string shown(const Token& token) {
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

  // Statements

  // Parses until a block that begins with one of these words, whose tokens are left.
  Body statements(std::initializer_list<std::string_view> ends) {
    const Level level(*this);
    Body body;
    while (peek().kind != Kind::end) {
      if (peek().kind == Kind::text) {
        body.push_back(make(Node::Kind::text));
        body.back()->name = next().text;
      } else if (peek().kind == Kind::output_begin) {
        next();
        body.push_back(make(Node::Kind::output));
        add(*body.back(), tuple_or_expression());
        expect(Kind::output_end, "", "}}");
      } else {
        const std::string& word = tokens_[at_ + 1].text;
        if (tokens_[at_ + 1].kind == Kind::name &&
            (std::find(ends.begin(), ends.end(), word) != ends.end() || is_end(word)))
          break;
        next();
        body.push_back(statement());
      }
    }
    return body;
  }
  static bool is_end(std::string_view word) { return word.starts_with("end") || word == "else" || word == "elif"; }

  void end_block() { expect(Kind::block_end, "", "%}"); }
  void end_of(std::string_view word) {
    if (!peek().is(Kind::block_begin, "")) refuse("{{% {} %}} is missing", word);
    next();
    if (!accept_name(word)) refuse("{{% {} %}} is needed, not {}", word, shown(peek()));
    end_block();
  }
  bool accept_block(std::string_view word) {
    if (peek().kind != Kind::block_begin || !tokens_[at_ + 1].is(Kind::name, word)) return false;
    at_ += 2;
    return true;
  }

  NodePtr statement() {
    const int line = peek().line;
    const std::string word = take_name();
    NodePtr node = statement_of(word);
    node->line = line;
    return node;
  }

  NodePtr statement_of(const std::string& word) {
    if (word == "if") return branch();
    if (word == "for") return loop();
    if (word == "set") return set();
    if (word == "macro") return macro();
    if (word == "generation") {
      NodePtr node = make(Node::Kind::generation);
      end_block();
      node->bodies.push_back(statements({"endgeneration"}));
      end_of("endgeneration");
      return node;
    }
    if (word == "break" || word == "continue") {
      if (loops_ == 0) refuse("{{% {} %}} outside of a loop", word);
      NodePtr node = make(word == "break" ? Node::Kind::stop : Node::Kind::skip);
      end_block();
      return node;
    }
    refuse("{{% {} %}} is not supported", shortened(word, 40));
  }

  NodePtr branch() {
    NodePtr node = make(Node::Kind::branch);
    do {
      add(*node, tuple_or_expression());
      end_block();
      node->bodies.push_back(statements({}));
    } while (accept_block("elif"));
    if (accept_block("else")) {
      end_block();
      node->bodies.push_back(statements({}));
    }
    end_of("endif");
    return node;
  }

  NodePtr loop() {
    NodePtr node = make(Node::Kind::loop);
    const bool paren = accept_op("(");
    do node->targets.push_back(take_name());
    while (accept_op(",") && peek().kind == Kind::name && peek().text != "in");
    if (paren) expect_op(")");
    if (!accept_name("in")) refuse("`in` is needed after the names of {{% for %}}, not {}", shown(peek()));
    add(*node, tuple_or_expression(false));
    add(*node, accept_name("if") ? expression() : nullptr);
    if (accept_name("recursive")) refuse("{{% for %}} with recursive is not supported");
    end_block();
    ++loops_;
    node->bodies.push_back(statements({}));
    --loops_;
    if (accept_block("else")) {
      end_block();
      node->bodies.push_back(statements({}));
    }
    end_of("endfor");
    return node;
  }

  NodePtr set() {
    NodePtr node = make(Node::Kind::set);
    do node->targets.push_back(take_name());
    while (accept_op(","));
    if (node->targets.size() == 1 && accept_op(".")) {
      node->name = node->targets[0];
      node->targets[0] = take_name();
    }
    if (accept_op("=")) {
      add(*node, tuple_or_expression());
      end_block();
      return node;
    }
    if (node->targets.size() != 1 || !node->name.empty()) refuse("`=` is needed, not {}", shown(peek()));
    node->kind = Node::Kind::set_block;
    NodePtr content = make(Node::Kind::variable);  // what the filters begin with: the block's text
    add(*node, peek().is(Kind::op, "|") ? filters(std::move(content)) : nullptr);
    end_block();
    node->bodies.push_back(statements({"endset"}));
    end_of("endset");
    return node;
  }

  NodePtr macro() {
    NodePtr node = make(Node::Kind::macro, take_name());
    expect_op("(");
    while (!accept_op(")")) {
      node->targets.push_back(take_name());
      if (accept_op("="))
        node->named.emplace_back(node->targets.back(), expression());
      else if (!node->named.empty())
        refuse("the argument {} without a default follows one with a default", node->targets.back());
      if (!peek().is(Kind::op, ")")) expect_op(",");
    }
    end_block();
    const int loops = std::exchange(loops_, 0);
    node->bodies.push_back(statements({"endmacro"}));
    loops_ = loops;
    end_of("endmacro");
    return node;
  }

  // Expressions, by falling precedence, as in Jinja's parser

  NodePtr tuple_or_expression(bool with_condition = true) {
    const auto one = [&] { return with_condition ? expression() : either(); };
    NodePtr first = one();
    if (!peek().is(Kind::op, ",")) return first;
    NodePtr node = make_of(Node::Kind::tuple, "", std::move(first));
    while (accept_op(",") && peek().kind != Kind::block_end && peek().kind != Kind::output_end) add(*node, one());
    return node;
  }

  NodePtr expression() {
    const Level level(*this);
    NodePtr node = either();
    while (accept_name("if")) {
      NodePtr condition = either();
      NodePtr otherwise = accept_name("else") ? expression() : nullptr;
      node = make_of(Node::Kind::conditional, "", std::move(node), std::move(condition), std::move(otherwise));
    }
    return node;
  }

  // Operands joined by any of these operators, from left to right.
  template <class Operand>
  NodePtr joined(Kind kind, std::initializer_list<std::string_view> operators, Operand&& operand) {
    NodePtr node = operand();
    while (true) {
      const auto op =
          std::find_if(operators.begin(), operators.end(), [&](std::string_view text) { return accept(kind, text); });
      if (op == operators.end()) return node;
      NodePtr right = operand();
      node = make_of(Node::Kind::binary, std::string(*op), std::move(node), std::move(right));
    }
  }

  NodePtr either() {
    return joined(Kind::name, {"or"}, [&] { return joined(Kind::name, {"and"}, [&] { return negation(); }); });
  }

  NodePtr negation() {
    const Level level(*this);
    if (accept_name("not")) return make_of(Node::Kind::unary, "not", negation());
    return comparison();
  }

  NodePtr comparison() {
    NodePtr node = sum();
    std::vector<std::string> operators;
    std::vector<NodePtr> operands;
    while (true) {
      constexpr std::string_view kOperators[] = {"==", "!=", "<=", ">=", "<", ">"};
      const auto op = std::find_if(std::begin(kOperators), std::end(kOperators),
                                   [&](std::string_view text) { return accept_op(text); });
      if (op != std::end(kOperators)) {
        operators.emplace_back(*op);
      } else if (accept_name("in")) {
        operators.emplace_back("in");
      } else if (peek().is(Kind::name, "not") && tokens_[at_ + 1].is(Kind::name, "in")) {
        at_ += 2;
        operators.emplace_back("not in");
      } else {
        break;
      }
      operands.push_back(sum());
    }
    if (operators.empty()) return node;
    node = make_of(Node::Kind::compare, "", std::move(node));
    for (NodePtr& operand : operands) add(*node, std::move(operand));
    node->operators = std::move(operators);
    return node;
  }

  NodePtr sum() {
    const auto power = [&] { return joined(Kind::op, {"**"}, [&] { return unary(true); }); };
    const auto product = [&] { return joined(Kind::op, {"*", "//", "/", "%"}, power); };
    const auto concatenation = [&] { return joined(Kind::op, {"~"}, product); };
    return joined(Kind::op, {"+", "-"}, concatenation);
  }

  NodePtr unary(bool with_filters) {
    const Level level(*this);
    NodePtr node;
    if (accept_op("-"))
      node = make_of(Node::Kind::unary, "-", unary(false));
    else if (accept_op("+"))
      node = make_of(Node::Kind::unary, "+", unary(false));
    else
      node = primary();
    node = postfix(std::move(node));
    return with_filters ? filters(std::move(node)) : std::move(node);
  }

  NodePtr constant(Value value) const {
    NodePtr node = make(Node::Kind::constant);
    node->value = std::move(value);
    return node;
  }

  NodePtr primary() {
    const Token token = peek();
    if (token.kind == Kind::name) return named();
    if (token.kind == Kind::string) {
      std::string text;
      while (peek().kind == Kind::string) text += next().text;  // adjacent strings are one
      return constant(std::move(text));
    }
    if (token.kind == Kind::integer || token.kind == Kind::real) return number();
    if (accept_op("(")) {
      if (accept_op(")")) return make(Node::Kind::tuple);
      NodePtr node = parenthesized();
      expect_op(")");
      return node;
    }
    if (accept_op("[")) {
      NodePtr node = make(Node::Kind::list);
      while (!accept_op("]")) {
        add(*node, expression());
        if (!peek().is(Kind::op, "]")) expect_op(",");
      }
      return node;
    }
    if (accept_op("{")) {
      NodePtr node = make(Node::Kind::dict);
      while (!accept_op("}")) {
        add(*node, expression());
        expect_op(":");
        add(*node, expression());
        if (!peek().is(Kind::op, "}")) expect_op(",");
      }
      return node;
    }
    refuse("a value is needed, not {}", shown(token));
  }

  NodePtr parenthesized() {
    NodePtr first = expression();
    if (!peek().is(Kind::op, ",")) return first;
    NodePtr node = make_of(Node::Kind::tuple, "", std::move(first));
    while (accept_op(",") && !peek().is(Kind::op, ")")) add(*node, expression());
    return node;
  }

  NodePtr named() {
    const std::string& name = peek().text;
    constexpr std::string_view kReserved[] = {"and", "or", "not", "if", "else", "elif", "in", "is"};
    if (std::find(std::begin(kReserved), std::end(kReserved), name) != std::end(kReserved))
      refuse("a value is needed, not {}", shown(peek()));
    NodePtr node;
    if (name == "true" || name == "True")
      node = constant(true);
    else if (name == "false" || name == "False")
      node = constant(false);
    else if (name == "none" || name == "None")
      node = constant(Value::none());
    else
      node = make(Node::Kind::variable, name);
    next();
    return node;
  }

  NodePtr number() {
    const Token token = next();
    const char *const begin = token.text.data(), *const end = begin + token.text.size();
    if (token.kind == Kind::integer) {
      int64_t value = 0;
      if (std::from_chars(begin, end, value).ec != std::errc()) refuse("{} has more than 64 bits", token.text);
      return constant(value);
    }
    double value = 0;
    if (std::from_chars(begin, end, value).ec != std::errc()) refuse("{} is beyond the range of a float", token.text);
    return constant(value);
  }

  // What may follow a value: .name, [item], (arguments).
  NodePtr postfix(NodePtr node) {
    while (true) {
      if (accept_op(".")) {
        if (peek().kind == Kind::integer) {
          node = make_of(Node::Kind::item, "", std::move(node), number());
        } else {
          std::string name = take_name();
          node = make_of(Node::Kind::attribute, std::move(name), std::move(node));
        }
      } else if (accept_op("[")) {
        node = subscript(std::move(node));
      } else if (peek().is(Kind::op, "(")) {
        node = call(Node::Kind::call, "", std::move(node));
      } else {
        return node;
      }
    }
  }

  NodePtr subscript(NodePtr node) {
    NodePtr bounds[3];
    bool colon = false;
    size_t i = 0;
    if (peek().is(Kind::op, "]")) refuse("an index is needed in [ ]");
    while (!accept_op("]")) {
      if (accept_op(":")) {
        colon = true;
        if (++i > 2) refuse("a slice has more than three parts");
      } else {
        if (bounds[i]) refuse("an index of several parts is not supported");
        bounds[i] = expression();
      }
    }
    if (!colon) return make_of(Node::Kind::item, "", std::move(node), std::move(bounds[0]));
    return make_of(Node::Kind::slice, "", std::move(node), std::move(bounds[0]), std::move(bounds[1]),
                   std::move(bounds[2]));
  }

  // A node whose first child is `subject`, and the others the arguments that follow in parentheses, if there are any.
  NodePtr call(Node::Kind kind, std::string name, NodePtr subject) {
    NodePtr node = make_of(kind, std::move(name), std::move(subject));
    if (!accept_op("(")) return node;
    while (!accept_op(")")) {
      if (peek().is(Kind::op, "*") || peek().is(Kind::op, "**"))
        refuse("arguments that begin with {} are not supported", peek().text);
      if (peek().kind == Kind::name && tokens_[at_ + 1].is(Kind::op, "=")) {
        std::string key = next().text;
        next();
        node->named.emplace_back(std::move(key), expression());
        deepen(*node, *node->named.back().second);
      } else {
        if (!node->named.empty()) refuse("an argument without a name follows one with a name");
        add(*node, expression());
      }
      if (!peek().is(Kind::op, ")")) expect_op(",");
    }
    return node;
  }

  NodePtr filters(NodePtr node) {
    while (true) {
      if (accept_op("|")) {
        std::string name = take_name();
        node = call(Node::Kind::filter, std::move(name), std::move(node));
      } else if (accept_name("is")) {
        node = test(std::move(node));
      } else if (peek().is(Kind::op, "(")) {
        node = call(Node::Kind::call, "", std::move(node));
      } else {
        return node;
      }
    }
  }

  NodePtr test(NodePtr subject) {
    const bool negated = accept_name("not");
    std::string name = take_name();
    NodePtr node;
    if (peek().is(Kind::op, "(")) {
      node = call(Node::Kind::test, std::move(name), std::move(subject));
    } else {
      node = make_of(Node::Kind::test, std::move(name), std::move(subject));
      constexpr std::string_view kEnds[] = {"else", "or", "and", "is", "if", "in", "not"};
      const bool value =
          peek().kind == Kind::string || peek().kind == Kind::integer || peek().kind == Kind::real ||
          peek().is(Kind::op, "[") || peek().is(Kind::op, "{") ||
          (peek().kind == Kind::name && std::find(std::begin(kEnds), std::end(kEnds), peek().text) == std::end(kEnds));
      if (value) add(*node, postfix(primary()));
    }
    return negated ? make_of(Node::Kind::unary, "not", std::move(node)) : std::move(node);
  }

  const std::string& name_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int level_ = 0, loops_ = 0;
};

}  // namespace

std::vector<NodePtr> parse_template(std::string_view source, const std::string& name) {
  return Parser(source, name).run();
}

}  // namespace triad::chat
