// Statements, and the template as a whole.
#include <algorithm>
#include <initializer_list>
#include <utility>

#include "io/chat/expression_parser.h"

namespace triad::chat {

namespace {

using Body = std::vector<NodePtr>;

class Parser : ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  Body run() {
    Body body = statements({});
    if (peek().kind != Kind::end) refuse("{{% {} %}} has no beginning", peek(1).text);
    return body;
  }

 private:
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
        const std::string& word = peek(1).text;
        if (peek(1).kind == Kind::name && (std::find(ends.begin(), ends.end(), word) != ends.end() || is_end(word)))
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
    if (peek().kind != Kind::block_begin || !peek(1).is(Kind::name, word)) return false;
    next(), next();
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

  int loops_ = 0;  // the loops around a statement
};

}  // namespace

std::vector<NodePtr> parse_template(std::string_view source, const std::string& name) {
  return Parser(source, name).run();
}

}  // namespace triad::chat
