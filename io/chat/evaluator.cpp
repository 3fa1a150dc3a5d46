#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_map>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/chat/arithmetic.h"
#include "io/chat/builtins.h"
#include "io/chat/template.h"

namespace triad::chat {

// Variables that {% set %}, {% for %} and a macro's arguments make.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<std::string, Value>> values = {};

  const Value* find(const std::string& name) const {
    for (const Scope* scope = this; scope != nullptr; scope = scope->parent)
      for (const auto& [key, value] : scope->values)
        if (key == name) return &value;
    return nullptr;
  }
  void set(const std::string& name, Value value) {
    for (auto& [key, present] : values)
      if (key == name) return void(present = std::move(value));
    values.emplace_back(name, std::move(value));
  }
};

namespace {

using Kind = Node::Kind;

// Steps that any rendering may take, and further ones by the size of what it renders.
constexpr int64_t kSteps = 1 << 19, kStepsPerByte = 64;
constexpr int kMaxLevel = 500;  // levels of recursion, also through macros

bool is_function(const std::string& name) {
  return name == "raise_exception" || name == "namespace" || name == "range";
}

class Evaluator {
 public:
  Evaluator(const Dict& variables, size_t input_bytes)
      : variables_(variables), budget_(kSteps + kStepsPerByte * static_cast<int64_t>(input_bytes)) {
    const Value* const messages = variables.find("messages");
    if (messages == nullptr || !messages->is_list()) return;
    for (const Value& message : messages->list().items)
      if (message.is_dict()) messages_.emplace(&message.dict(), static_cast<int64_t>(messages_.size()));
  }

  Rendered render(const std::vector<NodePtr>& body) {
    run(body);
    return std::move(out_);
  }
  int line() const { return line_; }

 private:
  enum class Flow { on, stop, skip };

  // Counts the levels of recursion.
  class Level {
   public:
    explicit Level(Evaluator& evaluator) : evaluator_(evaluator) {
      if (++evaluator_.level_ > kMaxLevel) fail("it recurses deeper than {} levels", kMaxLevel);
    }
    ~Level() { --evaluator_.level_; }
    Level(const Level&) = delete;

   private:
    Evaluator& evaluator_;
  };

  // Statements

  Flow run(const std::vector<NodePtr>& body) {
    const Level level(*this);
    for (const NodePtr& node : body)
      if (const Flow flow = run(*node); flow != Flow::on) return flow;
    return Flow::on;
  }

  Flow run(const Node& node) {
    line_ = node.line;
    budget_.spend();
    switch (node.kind) {
      case Kind::text:
        write(node.name);
        return Flow::on;
      case Kind::output:
        write(to_text(eval(*node.children[0]), budget_));
        return Flow::on;
      case Kind::branch:
        return run_branch(node);
      case Kind::loop:
        return run_loop(node);
      case Kind::set:
        assign(node, eval(*node.children[0]));
        return Flow::on;
      case Kind::set_block:
        run_set_block(node);
        return Flow::on;
      case Kind::macro:
        scope_->set(node.name, Macro{&node, scope_});
        return Flow::on;
      case Kind::generation:
        return run_generation(node);
      case Kind::stop:
        return Flow::stop;
      default:
        return Flow::skip;
    }
  }

  void write(const std::string& text) {
    budget_.spend(text.size());
    out_.text += text;
  }

  Flow run_branch(const Node& node) {
    for (size_t i = 0; i < node.children.size(); ++i)
      if (eval(*node.children[i]).truth()) return run(node.bodies[i]);
    return node.bodies.size() > node.children.size() ? run(node.bodies.back()) : Flow::on;
  }

  // Runs f in a scope of its own.
  template <class F>
  auto in_scope(Scope* parent, F&& f) {
    Scope inner{parent};
    Scope* const outer = std::exchange(scope_, &inner);
    struct Restore {
      Scope*& scope;
      Scope* outer;
      ~Restore() { scope = outer; }
    } const restore{scope_, outer};
    return f();
  }

  Flow run_loop(const Node& node) {
    std::vector<Value> items = items_of(eval(*node.children[0]), budget_);
    if (node.children[1]) {
      std::vector<Value> kept;
      for (Value& item : items) {
        const bool wanted = in_scope(scope_, [&] {
          bind(node.targets, item);
          return eval(*node.children[1]).truth();
        });
        if (wanted) kept.push_back(std::move(item));
      }
      items = std::move(kept);
    }
    if (items.empty()) return node.bodies.size() > 1 ? run(node.bodies[1]) : Flow::on;
    ++loop_depth_;
    const auto loop = std::make_shared<Loop>(Loop{&items, 0, loop_depth_});
    for (; loop->index < items.size(); ++loop->index) {
      budget_.spend();
      const Value& item = items[loop->index];
      const int64_t before = std::exchange(message_, index_of(item));
      const size_t begin = out_.text.size();
      const Flow flow = in_scope(scope_, [&] {
        bind(node.targets, item);
        scope_->set("loop", std::shared_ptr<const Loop>(loop));
        return run(node.bodies[0]);
      });
      if (is_message(item) && captures_ == 0 && out_.text.size() > begin)
        out_.turns.push_back({begin, out_.text.size(), message_});
      message_ = before;
      if (flow == Flow::stop) break;
    }
    --loop_depth_;
    return Flow::on;
  }

  bool is_message(const Value& item) const { return item.is_dict() && messages_.contains(&item.dict()); }
  // The message that an item is, or else the one in whose turn the loop runs.
  int64_t index_of(const Value& item) const { return is_message(item) ? messages_.at(&item.dict()) : message_; }

  void bind(const std::vector<std::string>& targets, const Value& value) {
    if (targets.size() == 1) return scope_->set(targets[0], value);
    const std::vector<Value> parts = items_of(value, budget_);
    if (parts.size() != targets.size()) fail("{} values for {} names", parts.size(), targets.size());
    for (size_t i = 0; i < parts.size(); ++i) scope_->set(targets[i], parts[i]);
  }

  void assign(const Node& node, const Value& value) {
    if (node.name.empty()) return bind(node.targets, value);
    const Value* const names = scope_->find(node.name);
    if (names == nullptr || !names->is_namespace())
      fail("`{}` is no namespace, and only those can be changed", node.name);
    store(*names->names(), node.targets[0], value);
  }

  static void store(std::unordered_map<std::string, Value>& names, const std::string& name, const Value& value) {
    if (name.starts_with('_')) fail("the name {} of a namespace's value begins with an underscore", name);
    if (value.is_namespace() || value.is_loop() || value.is_macro())
      fail("{} in a namespace is not supported", value.kind());
    names[name] = value;
  }

  // What a body writes, kept from the output.
  std::string captured(const std::vector<NodePtr>& body) {
    std::string outer = std::exchange(out_.text, {});
    ++captures_;
    run(body);
    --captures_;
    return std::exchange(out_.text, std::move(outer));
  }

  void run_set_block(const Node& node) {
    Value value = in_scope(scope_, [&] { return captured(node.bodies[0]); });
    if (node.children[0])
      value = in_scope(scope_, [&] {
        scope_->set("", value);
        return eval(*node.children[0]);
      });
    bind(node.targets, value);
  }

  Flow run_generation(const Node& node) {
    if (captures_ > 0) fail("{{% generation %}} within a macro or a block of {{% set %}} is not supported");
    const size_t begin = out_.text.size();
    const Flow flow = in_scope(scope_, [&] { return run(node.bodies[0]); });
    out_.generated.push_back({begin, out_.text.size(), message_});
    return flow;
  }

  // Expressions

  Value eval(const Node& node) {
    const Level level(*this);
    line_ = node.line;
    budget_.spend();
    switch (node.kind) {
      case Kind::constant:
        return node.value;
      case Kind::list:
        return Value::list(all(node));
      case Kind::tuple:
        return Value::list(all(node), List::Kind::tuple);
      case Kind::dict:
        return dict(node);
      case Kind::variable:
        return variable(node);
      case Kind::attribute:
        return attribute(eval(*node.children[0]), node.name);
      case Kind::item:
        return item(node);
      case Kind::slice:
        return slice(node);
      case Kind::call:
        return call(node);
      case Kind::filter: {
        const Value value = eval(*node.children[0]);
        return apply_filter(node.name, value, arguments(node), budget_);
      }
      case Kind::test: {
        const Value value = eval(*node.children[0]);
        return apply_test(node.name, value, arguments(node), budget_);
      }
      case Kind::unary:
        return negated(node.name, eval(*node.children[0]));
      case Kind::binary:
        return binary(node);
      case Kind::compare:
        return comparison(node);
      default:
        break;  // a conditional
    }
    if (eval(*node.children[1]).truth()) return eval(*node.children[0]);
    return node.children[2] ? eval(*node.children[2]) : Value();
  }

  std::vector<Value> all(const Node& node, size_t first = 0) {
    std::vector<Value> values;
    for (size_t i = first; i < node.children.size(); ++i) values.push_back(eval(*node.children[i]));
    return values;
  }

  Value dict(const Node& node) {
    Dict dict;
    for (size_t i = 0; i + 1 < node.children.size(); i += 2) {
      const Value key = eval(*node.children[i]);
      if (!key.is_string()) fail("{} as the key of a dict is not supported", key.kind());
      dict.set(key.string(), eval(*node.children[i + 1]));
    }
    return Value::dict(std::move(dict));
  }

  Value variable(const Node& node) const {
    if (const Value* const value = scope_->find(node.name)) return *value;
    if (const Value* const value = variables_.find(node.name)) return *value;
    if (is_function(node.name)) fail("the function {} is not called", node.name);
    return Value::undefined(node.name);
  }

  Value attribute(const Value& object, const std::string& name) {
    if (object.is_namespace()) {
      const auto found = object.names()->find(name);
      return found == object.names()->end() ? Value::undefined(name) : found->second;
    }
    if (object.is_loop()) return loop_attribute(object.loop(), name);
    if (has_method(object, name)) fail("the method {} of {} is not called", name, object.kind());
    return item_of(object, name, name, budget_);
  }

  static Value loop_attribute(const Loop& loop, const std::string& name) {
    const auto size = static_cast<int64_t>(loop.items->size()), index = static_cast<int64_t>(loop.index);
    if (name == "index") return index + 1;
    if (name == "index0") return index;
    if (name == "revindex") return size - index;
    if (name == "revindex0") return size - index - 1;
    if (name == "first") return index == 0;
    if (name == "last") return index + 1 == size;
    if (name == "length") return size;
    if (name == "previtem") return index == 0 ? Value::undefined(name) : (*loop.items)[loop.index - 1];
    if (name == "nextitem") return index + 1 == size ? Value::undefined(name) : (*loop.items)[loop.index + 1];
    fail("loop.{} is not supported", name);
  }

  Value item(const Node& node) {
    const Value object = eval(*node.children[0]), key = eval(*node.children[1]);
    if (object.is_namespace() || object.is_loop() || object.is_macro()) fail("{} has no items", object.kind());
    return item_of(object, key, key.is_string() ? key.string() : "item", budget_);
  }

  Value slice(const Node& node) {
    const Value object = eval(*node.children[0]);
    Value bounds[3];
    for (size_t i = 0; i < 3; ++i)
      if (node.children[i + 1]) bounds[i] = eval(*node.children[i + 1]);
    if (object.is_list() && object.list().kind != List::Kind::generator) {
      std::vector<Value> kept;
      for (const size_t i : slice_indices(object.list().items.size(), bounds[0], bounds[1], bounds[2])) {
        budget_.spend(sizeof(Value));
        kept.push_back(object.list().items[i]);
      }
      return Value::list(std::move(kept), object.list().kind);
    }
    if (!object.is_string()) fail("{} has no slices", object.kind());
    const std::vector<Value> characters = items_of(object, budget_);
    std::string text;
    for (const size_t i : slice_indices(characters.size(), bounds[0], bounds[1], bounds[2]))
      text += characters[i].string();
    return text;
  }

  Arguments arguments(const Node& node) {
    std::vector<Value> values = all(node, 1);
    std::vector<std::pair<std::string, Value>> named;
    for (const auto& [name, value] : node.named) named.emplace_back(name, eval(*value));
    return {std::move(values), std::move(named)};
  }

  Value call(const Node& node) {
    const Node& callee = *node.children[0];
    if (callee.kind == Kind::attribute) {
      const Value object = eval(*callee.children[0]);
      return call_method(object, callee.name, arguments(node), budget_);
    }
    if (callee.kind != Kind::variable) fail("only a function, a macro or a method can be called");
    const Value* const found = scope_->find(callee.name);
    if (found != nullptr && found->is_macro()) return call_macro(found->macro(), callee.name, arguments(node));
    const Value* const variable = found != nullptr ? found : variables_.find(callee.name);
    // A record may say what the time is (chat_template_kwargs), whatever form the template asks for.
    if (variable != nullptr && variable->is_string() && callee.name == "strftime_now") return *variable;
    if (variable != nullptr) fail("`{}` is {}, and is called", callee.name, variable->kind());
    return call_function(callee.name, arguments(node));
  }

  Value call_function(const std::string& name, Arguments args) {
    if (name == "raise_exception") {
      const std::string message = to_text(args.take("message"), budget_);
      args.done();
      fail("the template refuses the conversation: {}", shortened(message, 300));
    }
    if (name == "namespace") {
      auto names = std::make_shared<std::unordered_map<std::string, Value>>();
      for (const auto& [key, value] : args.take_named()) store(*names, key, value);
      args.done();
      return names;
    }
    if (name == "range") return range(std::move(args));
    if (name == "strftime_now")
      fail(
          "the function strftime_now is not supported, because equal data would be other tokens on another day: a "
          "record's chat_template_kwargs may have a string of this name, which it then returns");
    fail("the function {} is not supported", shortened(name, 40));
  }

  Value range(Arguments args) {
    constexpr size_t kMostItems = 100'000;  // Jinja's limit
    std::vector<int64_t> bounds;
    for (const Value& value : args.take_rest()) {
      if (!value.is_int() && !value.is_bool()) fail("range needs integers, not {}", value.kind());
      bounds.push_back(value.integer());
    }
    args.done();
    if (bounds.empty() || bounds.size() > 3) fail("range takes 1 to 3 integers, not {}", bounds.size());
    const int64_t begin = bounds.size() > 1 ? bounds[0] : 0, end = bounds.size() > 1 ? bounds[1] : bounds[0];
    const int64_t step = bounds.size() > 2 ? bounds[2] : 1;
    if (step == 0) fail("range: the step is 0");
    std::vector<Value> items;
    for (int64_t at = begin; step > 0 ? at < end : at > end;) {
      if (items.size() == kMostItems) fail("range has more than {} items", kMostItems);
      budget_.spend(sizeof(Value));
      items.emplace_back(at);
      if (__builtin_add_overflow(at, step, &at)) break;
    }
    return Value::list(std::move(items));
  }

  Value call_macro(const Macro& macro, const std::string& name, Arguments args) {
    const Node& node = *macro.node;
    return in_scope(macro.scope, [&] {
      for (const std::string& target : node.targets) {
        const auto fallback = std::find_if(node.named.begin(), node.named.end(),
                                           [&](const auto& named) { return named.first == target; });
        // Jinja leaves an argument that is not given undefined.
        Value value = args.take(target, Value::undefined(target));
        if (value.is_undefined() && fallback != node.named.end()) value = eval(*fallback->second);
        scope_->set(target, std::move(value));
      }
      try {
        args.done();
      } catch (const Error& e) { fail("the macro {}: {}", name, e.what()); }
      return Value(captured(node.bodies[0]));
    });
  }

  Value binary(const Node& node) {
    Value left = eval(*node.children[0]);
    if (node.name == "and") return left.truth() ? eval(*node.children[1]) : left;
    if (node.name == "or") return left.truth() ? left : eval(*node.children[1]);
    return calculate(node.name, left, eval(*node.children[1]), budget_);
  }

  // a < b < c: each operand is evaluated once, and none after a comparison that fails.
  Value comparison(const Node& node) {
    Value left = eval(*node.children[0]);
    for (size_t i = 0; i < node.operators.size(); ++i) {
      Value right = eval(*node.children[i + 1]);
      if (!holds(node.operators[i], left, right, budget_)) return false;
      left = std::move(right);
    }
    return true;
  }

  const Dict& variables_;
  Budget budget_;
  std::unordered_map<const Dict*, int64_t> messages_;
  Scope top_;
  Scope* scope_ = &top_;
  Rendered out_;
  int64_t message_ = -1;  // the message in whose turn a loop is
  size_t loop_depth_ = 0;
  int captures_ = 0;  // levels of captured()
  int level_ = 0, line_ = 1;
};

bool has_generation(const std::vector<NodePtr>& body) {
  return std::any_of(body.begin(), body.end(), [](const NodePtr& node) {
    return node->kind == Kind::generation || std::any_of(node->bodies.begin(), node->bodies.end(),
                                                         [](const auto& inner) { return has_generation(inner); });
  });
}

}  // namespace

Template::Template(std::string_view source, std::string name)
    : name_(std::move(name)),
      body_(std::make_shared<const std::vector<NodePtr>>(parse_template(source, name_))),
      marks_generated_(has_generation(*body_)) {}

Rendered Template::render(const Dict& variables, size_t input_bytes) const {
  Evaluator evaluator(variables, input_bytes);
  try {
    return evaluator.render(*body_);
  } catch (const Error& e) {
    constexpr size_t kMessageBytes = 500;
    fail("{}: line {}: {}", name_, evaluator.line(), shortened(e.what(), kMessageBytes));
  }
}

}  // namespace triad::chat
