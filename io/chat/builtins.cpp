#include "io/chat/builtins.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <system_error>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/chat/strings.h"

namespace triad::chat {

namespace {

std::string text_argument(const Value& value, std::string_view name) {
  if (!value.is_string()) fail("the argument {} is {}: a string is needed", name, value.kind());
  return value.string();
}

// The value under a name with dots, as in map(attribute="function.name").
Value attribute_of(Value value, std::string_view names, Budget& budget) {
  while (true) {
    const size_t dot = names.find('.');
    const std::string name(names.substr(0, dot));
    int64_t index = 0;
    const bool number = !name.empty() &&
                        std::from_chars(name.data(), name.data() + name.size(), index).ptr == name.data() + name.size();
    value = item_of(value, number ? Value(index) : Value(name), name, budget);
    if (dot == std::string_view::npos) return value;
    names.remove_prefix(dot + 1);
  }
}

// select, reject, selectattr and rejectattr: the items for which a test, by default truth, is as wanted.
Value selected(const Value& value, Arguments args, bool wanted, bool by_attribute, Budget& budget) {
  const std::string attribute = by_attribute ? args.take_string("attribute") : "";
  std::vector<Value> rest = args.take_rest();
  args.done();
  std::string test;
  if (!rest.empty()) {
    test = text_argument(rest.front(), "test");
    rest.erase(rest.begin());
  }
  std::vector<Value> kept;
  for (Value& item : items_of(value, budget)) {
    budget.spend(sizeof(Value));
    const Value subject = by_attribute ? attribute_of(item, attribute, budget) : item;
    const bool is = test.empty() ? subject.truth() : apply_test(test, subject, {rest, {}}, budget);
    if (is == wanted) kept.push_back(std::move(item));
  }
  return Value::list(std::move(kept), List::Kind::generator);
}

Value mapped(const Value& value, Arguments args, Budget& budget) {
  std::vector<Value> rest = args.take_rest(), out;
  if (rest.empty()) {
    const std::string attribute = args.take_string("attribute");
    const Value fallback = args.take("default", Value());
    args.done();
    for (const Value& item : items_of(value, budget)) {
      budget.spend(sizeof(Value));
      out.push_back(attribute_of(item, attribute, budget));
      if (out.back().is_undefined() && !fallback.is_undefined()) out.back() = fallback;
    }
  } else {
    const std::string filter = text_argument(rest.front(), "filter");
    rest.erase(rest.begin());
    const auto named = args.take_named();
    for (const Value& item : items_of(value, budget)) {
      budget.spend(sizeof(Value));
      out.push_back(apply_filter(filter, item, {rest, named}, budget));
    }
  }
  return Value::list(std::move(out), List::Kind::generator);
}

Value sorted_items(const Value& value, Arguments args, Budget& budget) {
  const bool case_sensitive = args.take("case_sensitive", false).truth();
  const std::string by = text_argument(args.take("by", "key"), "by");
  const bool reverse = args.take("reverse", false).truth();
  args.done();
  if (by != "key") fail("dictsort by {} is not supported", shortened(by, 40));
  if (!value.is_dict()) fail("dictsort needs a dict, not {}", value.kind());
  std::vector<std::pair<std::string, Value>> pairs;
  for (const auto& [key, item] : value.dict().items) {
    budget.spend(2 * key.size() + 4 * sizeof(Value));
    pairs.emplace_back(case_sensitive ? key : lower_case(key, "dictsort"),
                       Value::list({Value(key), item}, List::Kind::tuple));
  }
  std::stable_sort(pairs.begin(), pairs.end(),
                   [&](const auto& a, const auto& b) { return reverse ? b.first < a.first : a.first < b.first; });
  std::vector<Value> out;
  for (auto& pair : pairs) out.push_back(std::move(pair.second));
  return Value::list(std::move(out));
}

Value pairs_of(const Value& value, Budget& budget) {
  std::vector<Value> pairs;
  for (const auto& [key, item] : value.dict().items) {
    budget.spend(key.size() + 4 * sizeof(Value));
    pairs.push_back(Value::list({Value(key), item}, List::Kind::tuple));
  }
  return Value::list(std::move(pairs));
}

int64_t length_of(const Value& value) {
  if (value.is_undefined()) return 0;
  if (value.is_string()) return static_cast<int64_t>(count_characters(value.string()));
  if (value.is_dict()) return static_cast<int64_t>(value.dict().items.size());
  if (!value.is_list() || value.list().kind == List::Kind::generator) fail("{} has no length", value.kind());
  return static_cast<int64_t>(value.list().items.size());
}

Value joined(const Value& value, Arguments args, Budget& budget) {
  const std::string between = to_text(args.take("d", ""), budget);
  const Value attribute = args.take("attribute", Value::none());
  args.done();
  std::string text;
  bool first = true;
  for (const Value& item : items_of(value, budget)) {
    if (!first) text += between;
    first = false;
    text +=
        to_text(attribute.is_none() ? item : attribute_of(item, text_argument(attribute, "attribute"), budget), budget);
    budget.spend(between.size());
  }
  return text;
}

// int(value): digits of a string, a float without its fraction, else the default.
Value integer_of(const Value& value, Arguments args) {
  const Value fallback = args.take("default", int64_t{0});
  args.done();
  if (value.is_int() || value.is_bool()) return value.integer();
  if (value.is_float()) {
    constexpr double kBeyond = 9223372036854775808.0;  // 2^63
    if (!(value.number() < kBeyond && value.number() >= -kBeyond)) return fallback;
    return static_cast<int64_t>(value.number());
  }
  if (!value.is_string()) return fallback;
  std::string text = strip(value.string(), {}, true, true);
  if (text.starts_with('+')) text.erase(0, 1);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc::result_out_of_range) fail("int: {} has more than 64 bits", shortened(text, 40));
  return error == std::errc() && end == text.data() + text.size() ? Value(number) : fallback;
}

Value json_of(const Value& value, Arguments args, Budget& budget) {
  JsonStyle style;
  style.ensure_ascii = args.take("ensure_ascii", false).truth();
  const Value indent = args.take("indent", Value::none());
  const Value separators = args.take("separators", Value::none());
  style.sort_keys = args.take("sort_keys", false).truth();
  args.done();
  if (!indent.is_none()) {
    if (!indent.is_int()) fail("tojson: indent is {}: an integer is needed", indent.kind());
    style.indent = std::max<int64_t>(0, indent.integer());
    style.item_separator = ",";
  }
  if (!separators.is_none()) {
    if (!separators.is_list() || separators.list().items.size() != 2) fail("tojson: separators needs two strings");
    style.item_separator = text_argument(separators.list().items[0], "separators");
    style.key_separator = text_argument(separators.list().items[1], "separators");
  }
  return to_json_text(value, style, budget);
}

Value end_item(const Value& value, bool first, Budget& budget) {
  if (!first && value.is_list() && value.list().kind == List::Kind::generator)
    fail("last needs a list, not a generator");
  std::vector<Value> items = items_of(value, budget);
  if (items.empty()) return Value::undefined(first ? "first item" : "last item");
  return first ? items.front() : items.back();
}

Value default_of(const Value& value, Arguments args) {
  const Value fallback = args.take("default_value", "");
  const bool by_truth = args.take("boolean", false).truth();
  args.done();
  return value.is_undefined() || (by_truth && !value.truth()) ? fallback : value;
}

}  // namespace

bool Arguments::next(std::string_view name, Value& value) {
  if (taken_ < values_.size()) {
    value = values_[taken_++];
    return true;
  }
  const auto found = std::find_if(named_.begin(), named_.end(), [&](const auto& n) { return n.first == name; });
  if (found == named_.end()) return false;
  value = std::move(found->second);
  named_.erase(found);
  return true;
}

Value Arguments::take(std::string_view name) {
  Value value;
  if (!next(name, value)) fail("the argument {} is missing", name);
  return value;
}
Value Arguments::take(std::string_view name, Value fallback) {
  next(name, fallback);
  return fallback;
}
int64_t Arguments::take_integer(std::string_view name, int64_t fallback) {
  const Value value = take(name, fallback);
  if (!value.is_int() && !value.is_bool()) fail("the argument {} is {}: an integer is needed", name, value.kind());
  return value.integer();
}
std::string Arguments::take_string(std::string_view name) { return text_argument(take(name), name); }
std::vector<Value> Arguments::take_rest() {
  std::vector<Value> rest(values_.begin() + static_cast<std::ptrdiff_t>(taken_), values_.end());
  taken_ = values_.size();
  return rest;
}
std::vector<std::pair<std::string, Value>> Arguments::take_named() { return std::exchange(named_, {}); }
void Arguments::done() const {
  if (taken_ < values_.size()) fail("{} arguments are more than it takes", values_.size());
  if (!named_.empty()) fail("the argument {} is not supported", named_.front().first);
}

Value item_of(const Value& object, const Value& key, const std::string& what, Budget& budget) {
  if (object.is_undefined()) fail("{} has no {}", object.kind(), what);
  if (object.is_dict() && key.is_string()) {
    if (const Value* const found = object.dict().find(key.string())) return *found;
  } else if ((object.is_list() || object.is_string()) && (key.is_int() || key.is_bool())) {
    if (object.is_list() && object.list().kind == List::Kind::generator) fail("a generator has no index: add | list");
    const bool list = object.is_list();
    if (!list) budget.spend(object.string().size());
    const auto size = static_cast<int64_t>(list ? object.list().items.size() : count_characters(object.string()));
    const int64_t index = key.integer() < 0 ? key.integer() + size : key.integer();
    if (index < 0 || index >= size) return Value::undefined(what);
    if (list) return object.list().items[static_cast<size_t>(index)];
    const size_t at = character_offset(object.string(), static_cast<size_t>(index));
    return object.string().substr(at, character_bytes(object.string(), at));
  }
  if (key.is_string() && has_method(object, key.string()))
    fail("the method {} of {} is not called", key.string(), object.kind());
  return Value::undefined(what);
}

Value apply_filter(const std::string& name, const Value& value, Arguments args, Budget& budget) {
  budget.spend(value.is_string() ? value.string().size() : 0);
  if (name == "tojson") return json_of(value, std::move(args), budget);
  if (name == "default" || name == "d") return default_of(value, std::move(args));
  if (name == "join") return joined(value, std::move(args), budget);
  if (name == "select") return selected(value, std::move(args), true, false, budget);
  if (name == "reject") return selected(value, std::move(args), false, false, budget);
  if (name == "selectattr") return selected(value, std::move(args), true, true, budget);
  if (name == "rejectattr") return selected(value, std::move(args), false, true, budget);
  if (name == "map") return mapped(value, std::move(args), budget);
  if (name == "dictsort") return sorted_items(value, std::move(args), budget);
  if (name == "int") return integer_of(value, std::move(args));
  if (name == "trim") {
    const Value characters = args.take("chars", Value::none());
    args.done();
    const std::string text = to_text(value, budget);
    return strip(text, stripped_characters(characters), true, true);
  }
  if (name == "replace") {
    const std::string old = args.take_string("s"), with = args.take_string("new");
    const Value count = args.take("count", Value::none());
    args.done();
    if (!count.is_none() && !count.is_int()) fail("the argument count is {}: an integer is needed", count.kind());
    return replaced(to_text(value, budget), old, with, count.is_none() ? -1 : count.integer(), budget);
  }
  if (value.is_marked_safe() && name != "string" && name != "safe" && name != "length")
    fail("the filter {} of a string that the filter safe has marked is not supported", shortened(name, 40));
  constexpr std::string_view kWithoutArguments[] = {"length", "count", "string", "safe",       "list",  "first",
                                                    "last",   "lower", "upper",  "capitalize", "items", "reverse"};
  if (std::find(std::begin(kWithoutArguments), std::end(kWithoutArguments), name) == std::end(kWithoutArguments))
    fail("the filter {} is not supported", shortened(name, 40));
  args.done();
  if (name == "length" || name == "count") return length_of(value);
  if (name == "safe") return Value::marked_safe(to_text(value, budget));
  if (name == "string") return value.is_marked_safe() ? value : to_text(value, budget);
  if (name == "list") return Value::list(items_of(value, budget));
  if (name == "first") return end_item(value, true, budget);
  if (name == "last") return end_item(value, false, budget);
  if (name == "lower") return lower_case(to_text(value, budget), "lower");
  if (name == "upper") return upper_case(to_text(value, budget), "upper");
  if (name == "capitalize") return capitalized(to_text(value, budget));
  if (name == "items") {
    if (value.is_undefined()) return Value::list({});
    if (!value.is_dict()) fail("items needs a dict, not {}", value.kind());
    return pairs_of(value, budget);
  }
  if (value.is_string()) fail("reverse of a string is not supported");
  std::vector<Value> items = items_of(value, budget);
  std::reverse(items.begin(), items.end());
  return Value::list(std::move(items), List::Kind::generator);
}

bool apply_test(const std::string& name, const Value& value, Arguments args, Budget& budget) {
  budget.spend();
  using Compared = bool (*)(int);
  constexpr std::pair<std::string_view, Compared> kOrders[] = {
      {"lt", [](int c) { return c < 0; }},  {"lessthan", [](int c) { return c < 0; }},
      {"<", [](int c) { return c < 0; }},   {"le", [](int c) { return c <= 0; }},
      {"<=", [](int c) { return c <= 0; }}, {"gt", [](int c) { return c > 0; }},
      {">", [](int c) { return c > 0; }},   {"greaterthan", [](int c) { return c > 0; }},
      {"ge", [](int c) { return c >= 0; }}, {">=", [](int c) { return c >= 0; }}};
  const auto other = [&] {
    const Value right = args.take("other");
    args.done();
    return right;
  };
  for (const auto& [order, holds] : kOrders)
    if (name == order) return holds(compare(value, other(), budget));
  if (name == "equalto" || name == "eq" || name == "==") return equal(value, other(), budget);
  if (name == "ne" || name == "!=") return !equal(value, other(), budget);
  if (name == "in") return contains(other(), value, budget);
  if (name == "divisibleby") {
    const Value by = other();
    if (!value.is_int() || !by.is_int() || by.integer() == 0) fail("divisibleby needs integers, and not 0");
    return by.integer() == -1 || value.integer() % by.integer() == 0;
  }
  constexpr std::string_view kWithoutArguments[] = {"defined", "undefined", "none",  "string",  "mapping",
                                                    "boolean", "true",      "false", "integer", "float",
                                                    "number",  "iterable",  "odd",   "even",    "sequence"};
  if (std::find(std::begin(kWithoutArguments), std::end(kWithoutArguments), name) == std::end(kWithoutArguments))
    fail("the test {} is not supported", shortened(name, 40));
  args.done();
  if (name == "defined") return !value.is_undefined();
  if (name == "undefined") return value.is_undefined();
  if (name == "none") return value.is_none();
  if (name == "string") return value.is_string();
  if (name == "mapping") return value.is_dict();
  if (name == "boolean") return value.is_bool();
  if (name == "true") return value.is_bool() && value.boolean();
  if (name == "false") return value.is_bool() && !value.boolean();
  if (name == "integer") return value.is_int();
  if (name == "float") return value.is_float();
  if (name == "number") return value.is_number();
  const bool several = value.is_string() || value.is_list() || value.is_dict() || value.is_undefined();
  if (name == "iterable") return several;
  if (name == "sequence") return several && !(value.is_list() && value.list().kind == List::Kind::generator);
  if (!value.is_int()) fail("{} needs an integer, not {}", name, value.kind());
  return (value.integer() % 2 != 0) == (name == "odd");
}

bool has_method(const Value& object, std::string_view name) {
  constexpr std::string_view kDictMethods[] = {"clear", "copy",    "fromkeys",   "get",    "items", "keys",
                                               "pop",   "popitem", "setdefault", "update", "values"};
  constexpr std::string_view kListMethods[] = {"append", "clear", "copy",   "count",   "extend", "index",
                                               "insert", "pop",   "remove", "reverse", "sort"};
  constexpr std::string_view kStringMethods[] = {
      "capitalize", "casefold",     "center",       "count",   "encode",     "endswith",    "expandtabs",
      "find",       "format",       "format_map",   "index",   "isalnum",    "isalpha",     "isascii",
      "isdecimal",  "isdigit",      "isidentifier", "islower", "isnumeric",  "isprintable", "isspace",
      "istitle",    "isupper",      "join",         "ljust",   "lower",      "lstrip",      "maketrans",
      "partition",  "removeprefix", "removesuffix", "replace", "rfind",      "rindex",      "rjust",
      "rpartition", "rsplit",       "rstrip",       "split",   "splitlines", "startswith",  "strip",
      "swapcase",   "title",        "translate",    "upper",   "zfill"};
  const auto among = [&](const auto& names) {
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
  };
  if (object.is_dict()) return among(kDictMethods);
  if (object.is_list()) return among(kListMethods);
  return object.is_string() && among(kStringMethods);
}

Value call_method(const Value& object, const std::string& name, Arguments args, Budget& budget) {
  budget.spend();
  if (object.is_undefined()) fail("{} has no method {}", object.kind(), name);
  if (object.is_marked_safe())
    fail("the method {} of a string that the filter safe has marked is not supported", shortened(name, 40));
  if (object.is_string()) return call_string_method(object.string(), name, std::move(args), budget);
  if (object.is_dict()) {
    const Dict& dict = object.dict();
    if (name == "get") {
      const Value key = args.take("key"), fallback = args.take("default", Value::none());
      args.done();
      const Value* const found = key.is_string() ? dict.find(key.string()) : nullptr;
      return found == nullptr ? fallback : *found;
    }
    if (name == "items" || name == "keys" || name == "values") {
      args.done();
      if (name == "items") return pairs_of(object, budget);
      if (name == "keys") return Value::list(items_of(object, budget));
      std::vector<Value> values;
      for (const auto& item : dict.items) values.push_back(item.second);
      budget.spend(values.size() * sizeof(Value));
      return Value::list(std::move(values));
    }
  }
  if (object.is_list() && (name == "index" || name == "count")) {
    const Value what = args.take("value");
    args.done();
    int64_t index = 0, count = 0;
    for (const Value& item : object.list().items) {
      const bool same = equal(item, what, budget);
      if (same && name == "index") return index;
      ++index;
      count += same ? 1 : 0;
    }
    if (name == "count") return count;
    fail("index: the value is not in the list");
  }
  fail("the method {} of {} is not supported", shortened(name, 40), object.kind());
}

}  // namespace triad::chat
