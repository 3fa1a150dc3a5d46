// The filters, tests and methods that chat templates use, with Python's and Jinja's meaning. An unknown one is an Error
// that names it.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/chat/value.h"

namespace triad::chat {

// The arguments of a call, which its function takes in order.
class Arguments {
 public:
  Arguments(std::vector<Value> values, std::vector<std::pair<std::string, Value>> named)
      : values_(std::move(values)), named_(std::move(named)) {}
  // The next argument, or the one with this name, or else the fallback; without one, an Error says that it is missing.
  Value take(std::string_view name);
  Value take(std::string_view name, Value fallback);
  int64_t take_integer(std::string_view name, int64_t fallback);
  std::string take_string(std::string_view name);
  std::vector<Value> take_rest();  // all that have no name
  std::vector<std::pair<std::string, Value>> take_named();
  void done() const;  // throws if an argument is left

 private:
  bool next(std::string_view name, Value& value);

  std::vector<Value> values_;
  std::vector<std::pair<std::string, Value>> named_;
  size_t taken_ = 0;
};

Value apply_filter(const std::string& name, const Value&, Arguments, Budget&);
bool apply_test(const std::string& name, const Value&, Arguments, Budget&);
Value call_method(const Value& object, const std::string& name, Arguments, Budget&);
bool has_method(const Value& object, std::string_view name);  // whether Python's object has a method of this name

// object[key], or undefined where there is none. what: what to call it then.
Value item_of(const Value& object, const Value& key, const std::string& what, Budget&);

}  // namespace triad::chat
