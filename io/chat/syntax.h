// A chat template's syntax tree, and the parser that makes it. What Jinja has and this does not is an Error that names
// the construct and its line.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/chat/value.h"

namespace triad::chat {

struct Node;
using NodePtr = std::unique_ptr<Node>;

struct Node {
  // Beside each kind: which fields it uses.
  enum class Kind {
    // Expressions
    constant,     // value
    list,         // children
    tuple,        // children
    dict,         // children: key, value, key, value, ...
    variable,     // name
    attribute,    // children[0].name
    item,         // children[0][children[1]]
    slice,        // children[0][children[1] : children[2] : children[3]]; a bound may be null
    call,         // children[0](children[1], ...; named)
    filter,       // children[0] | name(children[1], ...; named)
    test,         // children[0] is name(children[1], ...)
    unary,        // name children[0]: -, + or not
    binary,       // children[0] name children[1]: + - * / // % ** ~ and or
    compare,      // children[0] operators[0] children[1] operators[1] children[2] ...
    conditional,  // children[0] if children[1] else children[2], which may be null
    // Statements
    text,        // name
    output,      // children[0]
    branch,      // {% if %}: children[i] decides for bodies[i]; one body more is for else
    loop,        // {% for %}: targets in children[0] if children[1], which may be null: bodies[0], else bodies[1]
    set,         // targets = children[0]; one target with a name is name.target, an attribute of a namespace
    set_block,   // targets[0] = bodies[0], through the filter children[0] if that is not null
    macro,       // name(targets; named: those with a default): bodies[0]
    generation,  // bodies[0]
    stop,        // {% break %}
    skip,        // {% continue %}
  };
  Kind kind;
  int line = 1;
  std::string name = {};
  Value value = {};
  std::vector<NodePtr> children = {};
  std::vector<std::pair<std::string, NodePtr>> named = {};
  std::vector<std::string> operators = {}, targets = {};
  std::vector<std::vector<NodePtr>> bodies = {};
  int depth = 1;  // levels of expressions, this one included
};

// name: as for lex().
std::vector<NodePtr> parse_template(std::string_view source, const std::string& name);

}  // namespace triad::chat
