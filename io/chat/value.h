// The values that a chat template computes with, and what Python does with them: truth, equality, str(), repr(), JSON.
// Copies share strings, lists and dicts, which never change; only namespaces do.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "io/json_config.h"

namespace triad::chat {

// What a rendering may still spend. Every evaluated node and produced byte costs, so that any template ends, in time
// and memory bounded by the conversation's size.
class Budget {
 public:
  explicit Budget(int64_t steps) : left_(steps), all_(steps) {}
  void spend(size_t bytes = 0);  // throws an Error when nothing is left

 private:
  int64_t left_, all_;
};

class Value;
struct Node;   // syntax.h
struct Scope;  // evaluator.cpp

// A list, a tuple, or what a generator (selectattr, map, ...) yields.
struct List {
  enum class Kind { list, tuple, generator };
  Kind kind = Kind::list;
  std::vector<Value> items;
  int depth = 1;  // levels of lists and dicts, this one included
};

// A dict, in insertion order. Keys are strings, as in JSON.
struct Dict {
  std::vector<std::pair<std::string, Value>> items;
  std::unordered_map<std::string, size_t> index;  // only of large dicts
  int depth = 1;

  const Value* find(std::string_view key) const;  // null if it is absent
  void set(std::string key, Value value);
};

// What {% for %} calls `loop`.
struct Loop {
  const std::vector<Value>* items = nullptr;
  size_t index = 0, depth = 1;
};

struct Macro {
  const Node* node = nullptr;
  Scope* scope = nullptr;  // the scope in which it is defined
};

class Value {
 public:
  struct Undefined {
    std::string what;  // what is undefined, for messages
  };
  struct None {};
  using Namespace = std::shared_ptr<std::unordered_map<std::string, Value>>;

  Value() : v_(Undefined{}) {}
  Value(bool v) : v_(v) {}
  Value(int64_t v) : v_(v) {}
  Value(double v) : v_(v) {}
  Value(std::string v) : v_(std::make_shared<const std::string>(std::move(v))) {}
  Value(const char* v) : Value(std::string(v)) {}
  Value(Namespace v) : v_(std::move(v)) {}
  Value(std::shared_ptr<const Loop> v) : v_(std::move(v)) {}
  Value(Macro v) : v_(v) {}
  static Value none();
  static Value undefined(std::string what);
  // A string that the filter safe has marked: `+` and methods would escape what they join to it.
  static Value marked_safe(std::string);
  bool is_marked_safe() const { return safe_; }
  // Throw an Error if they would nest too deeply, or hold a namespace.
  static Value list(std::vector<Value> items, List::Kind kind = List::Kind::list);
  static Value dict(Dict);
  // A value from JSON. An integer that is no int64_t throws.
  static Value from_json(const Json&);

  bool is_undefined() const { return std::holds_alternative<Undefined>(v_); }
  bool is_none() const { return std::holds_alternative<None>(v_); }
  bool is_bool() const { return std::holds_alternative<bool>(v_); }
  bool is_int() const { return std::holds_alternative<int64_t>(v_); }
  bool is_float() const { return std::holds_alternative<double>(v_); }
  bool is_number() const { return is_int() || is_float() || is_bool(); }
  bool is_string() const { return std::holds_alternative<std::shared_ptr<const std::string>>(v_); }
  bool is_list() const { return std::holds_alternative<std::shared_ptr<const List>>(v_); }
  bool is_dict() const { return std::holds_alternative<std::shared_ptr<const Dict>>(v_); }
  bool is_namespace() const { return std::holds_alternative<Namespace>(v_); }
  bool is_loop() const { return std::holds_alternative<std::shared_ptr<const Loop>>(v_); }
  bool is_macro() const { return std::holds_alternative<Macro>(v_); }

  // The content, which has to be of that kind.
  bool boolean() const { return std::get<bool>(v_); }
  int64_t integer() const { return is_bool() ? boolean() : std::get<int64_t>(v_); }
  double number() const { return is_float() ? std::get<double>(v_) : static_cast<double>(integer()); }
  const std::string& string() const { return *std::get<std::shared_ptr<const std::string>>(v_); }
  const List& list() const { return *std::get<std::shared_ptr<const List>>(v_); }
  const Dict& dict() const { return *std::get<std::shared_ptr<const Dict>>(v_); }
  const Namespace& names() const { return std::get<Namespace>(v_); }
  const Loop& loop() const { return *std::get<std::shared_ptr<const Loop>>(v_); }
  const Macro& macro() const { return std::get<Macro>(v_); }
  const std::string& undefined_what() const { return std::get<Undefined>(v_).what; }

  bool truth() const;
  int depth() const;  // levels of lists and dicts
  // The kind in words for messages: "a string", "`messages`, which is undefined".
  std::string kind() const;

 private:
  std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const std::string>, std::shared_ptr<const List>,
               std::shared_ptr<const Dict>, Namespace, std::shared_ptr<const Loop>, Macro>
      v_;
  bool safe_ = false;
};

bool equal(const Value&, const Value&, Budget&);
// Below 0, 0 or above 0, of two numbers, strings or lists. Others throw.
int compare(const Value&, const Value&, Budget&);
bool contains(const Value& in, const Value& what, Budget&);  // what in in

// What a loop runs over: a list's items, a dict's keys, a string's characters. Others throw.
std::vector<Value> items_of(const Value&, Budget&);

// str(value), which {{ }} writes; repr(value), as in a printed list.
std::string to_text(const Value&, Budget&);
std::string to_repr(const Value&, Budget&);

// json.dumps.
struct JsonStyle {
  int64_t indent = -1;  // below 0: one line
  bool ensure_ascii = false, sort_keys = false;
  std::string item_separator = ", ", key_separator = ": ";
};
std::string to_json_text(const Value&, const JsonStyle&, Budget&);

// Characters, which index a string, and byte offsets. The text is UTF-8.
size_t count_characters(std::string_view text);
size_t character_offset(std::string_view text, size_t characters);

// A slice's indices, as Python's slice.indices; a bound that is none or undefined is left out.
std::vector<size_t> slice_indices(size_t size, const Value& begin, const Value& end, const Value& step);

}  // namespace triad::chat
