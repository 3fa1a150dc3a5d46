// Expressions by falling precedence, as in Jinja's parser.
#include "io/chat/expression_parser.h"

#include <charconv>
#include <cstdint>
#include <iterator>
#include <system_error>

namespace triad::chat {

std::string ExpressionParser::shown(const Token& token) {
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

NodePtr ExpressionParser::tuple_or_expression(bool with_condition) {
  const auto one = [&] { return with_condition ? expression() : either(); };
  NodePtr first = one();
  if (!peek().is(Kind::op, ",")) return first;
  NodePtr node = make_of(Node::Kind::tuple, "", std::move(first));
  while (accept_op(",") && peek().kind != Kind::block_end && peek().kind != Kind::output_end) add(*node, one());
  return node;
}

NodePtr ExpressionParser::expression() {
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
NodePtr ExpressionParser::joined(Kind kind, std::initializer_list<std::string_view> operators, Operand&& operand) {
  NodePtr node = operand();
  while (true) {
    const auto op =
        std::find_if(operators.begin(), operators.end(), [&](std::string_view text) { return accept(kind, text); });
    if (op == operators.end()) return node;
    NodePtr right = operand();
    node = make_of(Node::Kind::binary, std::string(*op), std::move(node), std::move(right));
  }
}

NodePtr ExpressionParser::either() {
  return joined(Kind::name, {"or"}, [&] { return joined(Kind::name, {"and"}, [&] { return negation(); }); });
}

NodePtr ExpressionParser::negation() {
  const Level level(*this);
  if (accept_name("not")) return make_of(Node::Kind::unary, "not", negation());
  return comparison();
}

NodePtr ExpressionParser::comparison() {
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
    } else if (peek().is(Kind::name, "not") && peek(1).is(Kind::name, "in")) {
      next(), next();
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

NodePtr ExpressionParser::sum() {
  const auto power = [&] { return joined(Kind::op, {"**"}, [&] { return unary(true); }); };
  const auto product = [&] { return joined(Kind::op, {"*", "//", "/", "%"}, power); };
  const auto concatenation = [&] { return joined(Kind::op, {"~"}, product); };
  return joined(Kind::op, {"+", "-"}, concatenation);
}

NodePtr ExpressionParser::unary(bool with_filters) {
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

NodePtr ExpressionParser::constant(Value value) const {
  NodePtr node = make(Node::Kind::constant);
  node->value = std::move(value);
  return node;
}

NodePtr ExpressionParser::primary() {
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

NodePtr ExpressionParser::parenthesized() {
  NodePtr first = expression();
  if (!peek().is(Kind::op, ",")) return first;
  NodePtr node = make_of(Node::Kind::tuple, "", std::move(first));
  while (accept_op(",") && !peek().is(Kind::op, ")")) add(*node, expression());
  return node;
}

NodePtr ExpressionParser::named() {
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

NodePtr ExpressionParser::number() {
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
NodePtr ExpressionParser::postfix(NodePtr node) {
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

NodePtr ExpressionParser::subscript(NodePtr node) {
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
NodePtr ExpressionParser::call(Node::Kind kind, std::string name, NodePtr subject) {
  NodePtr node = make_of(kind, std::move(name), std::move(subject));
  if (!accept_op("(")) return node;
  while (!accept_op(")")) {
    if (peek().is(Kind::op, "*") || peek().is(Kind::op, "**"))
      refuse("arguments that begin with {} are not supported", peek().text);
    if (peek().kind == Kind::name && peek(1).is(Kind::op, "=")) {
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

NodePtr ExpressionParser::filters(NodePtr node) {
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

NodePtr ExpressionParser::test(NodePtr subject) {
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

}  // namespace triad::chat
