// Builds a JSON value from nlohmann's SAX parser events, in time linear in the text's length. The library's own parsers
// are slower: with a callback they visit all of an object's elements after each element, and an ordered_json compares a
// new key with all keys before it. Works for any basic_json type; callers use parse_json (io/json_config.h).
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/json_config.h"

namespace triad {

// Throws an Error that begins with `what` if the text is not JSON, is nested deeper than kMaxJsonDepth, or has a key
// twice in one object.
template <class AnyJson>
class JsonBuilder final : public nlohmann::json_sax<AnyJson> {
 public:
  static AnyJson build(std::string_view text, const std::string& what, JsonComments comments) {
    JsonBuilder builder(what);
    AnyJson::sax_parse(text, &builder, AnyJson::input_format_t::json, true, comments == JsonComments::allowed);
    return std::move(builder.root_);
  }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(typename AnyJson::number_integer_t value) override { return add(value); }
  bool number_unsigned(typename AnyJson::number_unsigned_t value) override { return add(value); }
  bool number_float(typename AnyJson::number_float_t value, const std::string&) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(typename AnyJson::binary_t&) override { return false; }  // JSON text has no binary values
  bool start_object(size_t) override { return open(AnyJson::object()); }
  bool start_array(size_t) override { return open(AnyJson::array()); }
  bool key(std::string& key) override {
    TRIAD_CHECK(open_.back().keys.insert(key).second, "{}: an object has {} twice", what_, shortened(key));
    key_ = std::move(key);
    return true;
  }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& e) override {
    fail("{}: no JSON: {}", what_, shortened(e.what()));
  }

 private:
  struct Open {
    AnyJson* value;
    std::unordered_set<std::string> keys;  // an open object's keys so far; empty for a list
  };

  explicit JsonBuilder(const std::string& what) : what_(what) {}

  bool open(AnyJson empty) {
    TRIAD_CHECK(open_.size() < kMaxJsonDepth, "{}: nested more than {} deep", what_, kMaxJsonDepth);
    open_.push_back({place(std::move(empty)), {}});
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }
  template <class Value>
  bool add(Value&& value) {
    place(AnyJson(std::forward<Value>(value)));
    return true;
  }
  // Appends a value to the innermost open object or list and returns its address, which is valid until that object or
  // list gets its next value.
  AnyJson* place(AnyJson value) {
    if (open_.empty()) return &(root_ = std::move(value));
    AnyJson& container = *open_.back().value;
    if (container.is_array()) {
      auto& array = container.template get_ref<typename AnyJson::array_t&>();
      return &array.emplace_back(std::move(value));
    }
    auto& object = container.template get_ref<typename AnyJson::object_t&>();
    if constexpr (requires { object.emplace_back(std::move(key_), std::move(value)); })  // true for ordered_json only
      return &object.emplace_back(std::move(key_), std::move(value)).second;
    else
      return &object.emplace(std::move(key_), std::move(value)).first->second;
  }

  const std::string& what_;
  AnyJson root_;
  std::vector<Open> open_;
  std::string key_;  // key of the next value
};

}  // namespace triad
