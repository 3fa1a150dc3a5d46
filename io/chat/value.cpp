#include "io/chat/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/tokenizer/unicode.h"

namespace triad::chat {

namespace {

constexpr int kMaxLevels = 100;        // levels of lists and dicts, which printing and comparing recurse into
constexpr size_t kIndexedItems = 8;    // a dict with more items has an index
constexpr size_t kBytesForAStep = 16;  // bytes produced in the time and memory of an evaluated node

void check_item(const Value& value) {
  if (value.is_namespace() || value.is_loop() || value.is_macro())
    fail("{} in a list, dict or namespace is not supported", value.kind());
}

int depth_above(int deepest) {
  if (deepest >= kMaxLevels) fail("lists and dicts nest deeper than {} levels", kMaxLevels);
  return deepest + 1;
}

// A double as repr(float) writes it: the shortest digits that read back as the same, and an exponent below 1e-4 and
// from 1e16 on.
std::string float_text(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, x, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  const std::string sign = text.starts_with('-') ? "-" : "";
  text.remove_prefix(sign.size());
  const size_t e = text.find('e');
  std::string digits(text.substr(0, e));
  if (digits.size() > 1) digits.erase(1, 1);  // the point
  const int exponent = std::stoi(std::string(text.substr(e + 1)));
  constexpr int kLeast = -4, kMost = 16;
  if (exponent < kLeast || exponent >= kMost)
    return fmt::format("{}{}{}{}e{}{:02}", sign, digits[0], digits.size() > 1 ? "." : "", digits.substr(1),
                       exponent < 0 ? '-' : '+', std::abs(exponent));
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return sign + digits + std::string(whole - digits.size(), '0') + ".0";
  return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

void repr_string(std::string_view text, std::string& out) {
  const bool double_quoted = text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char quote = double_quoted ? '"' : '\'';
  out += quote;
  for (size_t at = 0; at < text.size(); at += character_bytes(text, at)) {
    const uint32_t point = point_at(text, at);
    if (point == static_cast<uint32_t>(quote) || point == '\\')
      out += '\\', out += static_cast<char>(point);
    else if (point == '\n')
      out += "\\n";
    else if (point == '\r')
      out += "\\r";
    else if (point == '\t')
      out += "\\t";
    else if (is_printable(point))
      out += text.substr(at, character_bytes(text, at));
    else
      out += point < 0x100     ? fmt::format("\\x{:02x}", point)
             : point < 0x10000 ? fmt::format("\\u{:04x}", point)
                               : fmt::format("\\U{:08x}", point);
  }
  out += quote;
}

void append_repr(const Value& value, std::string& out, Budget& budget) {
  const size_t before = out.size();
  if (value.is_string()) {
    repr_string(value.string(), out);
  } else if (value.is_list()) {
    const List& list = value.list();
    if (list.kind == List::Kind::generator) fail("what map, select or reject yields is written: add | list or | join");
    const bool tuple = list.kind == List::Kind::tuple;
    out += tuple ? '(' : '[';
    for (size_t i = 0; i < list.items.size(); ++i) {
      if (i > 0) out += ", ";
      append_repr(list.items[i], out, budget);
    }
    out += tuple ? (list.items.size() == 1 ? ",)" : ")") : "]";
  } else if (value.is_dict()) {
    out += '{';
    const auto& items = value.dict().items;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += ", ";
      repr_string(items[i].first, out);
      out += ": ";
      append_repr(items[i].second, out, budget);
    }
    out += '}';
  } else {
    out += value.is_undefined() ? "Undefined" : to_text(value, budget);
  }
  budget.spend(out.size() - before);
}

void json_string(std::string_view text, bool ensure_ascii, std::string& out) {
  out += '"';
  for (size_t at = 0; at < text.size(); at += character_bytes(text, at)) {
    const uint32_t point = point_at(text, at);
    switch (point) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\b':
        out += "\\b";
        break;
      default:
        if (point < 0x20 || (ensure_ascii && point >= 0x7f && point < 0x10000))
          out += fmt::format("\\u{:04x}", point);
        else if (ensure_ascii && point >= 0x10000)
          out += fmt::format("\\u{:04x}\\u{:04x}", 0xd800 + ((point - 0x10000) >> 10),
                             0xdc00 + ((point - 0x10000) & 0x3ff));
        else
          out += text.substr(at, character_bytes(text, at));
    }
  }
  out += '"';
}

void append_json(const Value& value, const JsonStyle& style, int level, std::string& out, Budget& budget) {
  const size_t before = out.size();
  const auto begin_line = [&](int at) {
    if (style.indent >= 0) out += "\n" + std::string(static_cast<size_t>(style.indent) * static_cast<size_t>(at), ' ');
  };
  // Items are separated by the separator; with an indent, by its comma and a new line.
  const auto write_all = [&](char open, char close, size_t n, auto&& write) {
    out += open;
    for (size_t i = 0; i < n; ++i) {
      if (i > 0) out += style.item_separator;
      begin_line(level + 1);
      write(i);
    }
    if (n > 0) begin_line(level);
    out += close;
  };
  if (value.is_none()) {
    out += "null";
  } else if (value.is_bool()) {
    out += value.boolean() ? "true" : "false";
  } else if (value.is_float() && !std::isfinite(value.number())) {
    out += std::isnan(value.number()) ? "NaN" : value.number() > 0 ? "Infinity" : "-Infinity";
  } else if (value.is_number()) {
    out += to_text(value, budget);
  } else if (value.is_string()) {
    json_string(value.string(), style.ensure_ascii, out);
  } else if (value.is_list() && value.list().kind != List::Kind::generator) {
    write_all('[', ']', value.list().items.size(),
              [&](size_t i) { append_json(value.list().items[i], style, level + 1, out, budget); });
  } else if (value.is_dict()) {
    std::vector<const std::pair<std::string, Value>*> items;
    for (const auto& item : value.dict().items) items.push_back(&item);
    if (style.sort_keys) std::sort(items.begin(), items.end(), [](auto* a, auto* b) { return a->first < b->first; });
    write_all('{', '}', items.size(), [&](size_t i) {
      json_string(items[i]->first, style.ensure_ascii, out);
      out += style.key_separator;
      append_json(items[i]->second, style, level + 1, out, budget);
    });
  } else {
    fail("tojson cannot write {}", value.kind());
  }
  budget.spend(out.size() - before);
}

}  // namespace

void Budget::spend(size_t bytes) {
  left_ -= 1 + static_cast<int64_t>(bytes / kBytesForAStep);
  if (left_ < 0)
    fail("it takes more than {} steps, the most that a conversation of this size may take: does it loop?", all_);
}

const Value* Dict::find(std::string_view key) const {
  if (!index.empty()) {
    const auto found = index.find(std::string(key));
    return found == index.end() ? nullptr : &items[found->second].second;
  }
  for (const auto& item : items)
    if (item.first == key) return &item.second;
  return nullptr;
}

void Dict::set(std::string key, Value value) {
  check_item(value);
  depth = std::max(depth, depth_above(value.depth()));
  if (const Value* const present = find(key)) {
    const_cast<Value&>(*present) = std::move(value);
    return;
  }
  if (!index.empty()) index.emplace(key, items.size());
  items.emplace_back(std::move(key), std::move(value));
  if (index.empty() && items.size() > kIndexedItems)
    for (size_t i = 0; i < items.size(); ++i) index.emplace(items[i].first, i);
}

Value Value::none() {
  Value value;
  value.v_ = None{};
  return value;
}

Value Value::undefined(std::string what) {
  Value value;
  value.v_ = Undefined{std::move(what)};
  return value;
}

Value Value::marked_safe(std::string text) {
  Value value(std::move(text));
  value.safe_ = true;
  return value;
}

Value Value::list(std::vector<Value> items, List::Kind kind) {
  int deepest = 0;
  for (const Value& item : items) {
    check_item(item);
    deepest = std::max(deepest, item.depth());
  }
  Value value;
  value.v_ = std::make_shared<const List>(List{kind, std::move(items), depth_above(deepest)});
  return value;
}

Value Value::dict(Dict dict) {
  Value value;
  value.v_ = std::make_shared<const Dict>(std::move(dict));
  return value;
}

Value Value::from_json(const Json& json) {
  if (json.is_null()) return none();
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_number()) {
    if (json.is_number_float()) return json.get<double>();
    const auto number = json.get<int64_t>();
    if (json.is_number_unsigned() && number < 0) fail("the number {} has more than 64 bits", brief(json));
    return number;
  }
  if (json.is_array()) {
    std::vector<Value> items;
    for (const Json& item : json) items.push_back(from_json(item));
    return list(std::move(items));
  }
  Dict all;
  for (const auto& [key, item] : json.items()) all.set(key, from_json(item));
  return dict(std::move(all));
}

bool Value::truth() const {
  if (is_undefined() || is_none()) return false;
  if (is_number()) return number() != 0;
  if (is_string()) return !string().empty();
  if (is_list()) return list().kind == List::Kind::generator || !list().items.empty();
  if (is_dict()) return !dict().items.empty();
  return true;
}

int Value::depth() const { return is_list() ? list().depth : is_dict() ? dict().depth : 0; }

std::string Value::kind() const {
  if (is_undefined())
    return undefined_what().empty() ? "an undefined value" : fmt::format("`{}`, which is undefined", undefined_what());
  if (is_none()) return "none";
  if (is_bool()) return "a boolean";
  if (is_int()) return "an integer";
  if (is_float()) return "a float";
  if (is_string()) return "a string";
  if (is_list()) return list().kind == List::Kind::generator ? "a generator" : "a list";
  if (is_dict()) return "a dict";
  return is_namespace() ? "a namespace" : is_loop() ? "`loop`" : "a macro";
}

bool equal(const Value& a, const Value& b, Budget& budget) {
  budget.spend();
  if (a.is_int() && b.is_int()) return a.integer() == b.integer();
  if (a.is_number() && b.is_number()) return a.number() == b.number();
  if (a.is_string() && b.is_string()) {
    budget.spend(std::min(a.string().size(), b.string().size()));
    return a.string() == b.string();
  }
  if (a.is_list() && b.is_list()) {
    const List &left = a.list(), &right = b.list();
    return left.kind == right.kind && left.kind != List::Kind::generator &&
           std::equal(left.items.begin(), left.items.end(), right.items.begin(), right.items.end(),
                      [&](const Value& x, const Value& y) { return equal(x, y, budget); });
  }
  if (a.is_dict() && b.is_dict()) {
    if (a.dict().items.size() != b.dict().items.size()) return false;
    return std::all_of(a.dict().items.begin(), a.dict().items.end(), [&](const auto& item) {
      const Value* const other = b.dict().find(item.first);
      return other != nullptr && equal(item.second, *other, budget);
    });
  }
  if (a.is_namespace() && b.is_namespace()) return a.names() == b.names();
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined());
}

int compare(const Value& a, const Value& b, Budget& budget) {
  budget.spend();
  if (a.is_number() && b.is_number()) {
    if (!a.is_float() && !b.is_float()) return a.integer() < b.integer() ? -1 : a.integer() > b.integer();
    return a.number() < b.number() ? -1 : a.number() > b.number();
  }
  if (a.is_string() && b.is_string()) {  // UTF-8 sorts by code points
    budget.spend(std::min(a.string().size(), b.string().size()));
    return a.string().compare(b.string());
  }
  if (a.is_list() && b.is_list() && a.list().kind == b.list().kind) {
    const auto &left = a.list().items, &right = b.list().items;
    for (size_t i = 0; i < std::min(left.size(), right.size()); ++i)
      if (!equal(left[i], right[i], budget)) return compare(left[i], right[i], budget);
    return left.size() < right.size() ? -1 : left.size() > right.size();
  }
  fail("{} and {} have no order", a.kind(), b.kind());
}

bool contains(const Value& in, const Value& what, Budget& budget) {
  if (in.is_string()) {
    if (!what.is_string()) fail("`in` a string needs a string before it, not {}", what.kind());
    budget.spend(in.string().size());
    return in.string().find(what.string()) != std::string::npos;
  }
  if (in.is_dict()) return what.is_string() && in.dict().find(what.string()) != nullptr;
  if (in.is_undefined()) return false;
  if (!in.is_list()) fail("`in` needs a string, list or dict after it, not {}", in.kind());
  return std::any_of(in.list().items.begin(), in.list().items.end(),
                     [&](const Value& item) { return equal(item, what, budget); });
}

std::vector<Value> items_of(const Value& value, Budget& budget) {
  if (value.is_undefined()) return {};
  if (value.is_list()) {
    budget.spend(value.list().items.size() * sizeof(Value));
    return value.list().items;
  }
  std::vector<Value> items;
  if (value.is_dict()) {
    for (const auto& item : value.dict().items) {
      budget.spend(item.first.size() + sizeof(Value));
      items.emplace_back(item.first);
    }
  } else if (value.is_string()) {
    const std::string& text = value.string();
    for (size_t at = 0; at < text.size(); at += character_bytes(text, at)) {
      budget.spend(sizeof(Value));
      items.emplace_back(text.substr(at, character_bytes(text, at)));
    }
  } else {
    fail("{} has no items", value.kind());
  }
  return items;
}

std::string to_text(const Value& value, Budget& budget) {
  if (value.is_undefined()) return "";
  if (value.is_none()) return "None";
  if (value.is_bool()) return value.boolean() ? "True" : "False";
  if (value.is_int()) return fmt::format("{}", value.integer());
  if (value.is_float()) return float_text(value.number());
  if (value.is_string()) {
    budget.spend(value.string().size());
    return value.string();
  }
  if (!value.is_list() && !value.is_dict()) fail("{} cannot be written", value.kind());
  return to_repr(value, budget);
}

std::string to_repr(const Value& value, Budget& budget) {
  std::string text;
  append_repr(value, text, budget);
  return text;
}

std::string to_json_text(const Value& value, const JsonStyle& style, Budget& budget) {
  constexpr int64_t kMostIndent = 16;
  if (style.indent > kMostIndent) fail("tojson: indent is {}: at most {} is supported", style.indent, kMostIndent);
  std::string text;
  append_json(value, style, 0, text, budget);
  return text;
}

size_t count_characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

size_t character_offset(std::string_view text, size_t characters) {
  size_t at = 0;
  for (; characters > 0 && at < text.size(); --characters) at += character_bytes(text, at);
  return at;
}

std::vector<size_t> slice_indices(size_t size, const Value& begin, const Value& end, const Value& step) {
  const auto n = static_cast<int64_t>(size);
  const auto bound = [&](const Value& value, int64_t absent) {
    if (value.is_undefined() || value.is_none()) return absent;
    if (!value.is_int() && !value.is_bool()) fail("a slice needs integers, not {}", value.kind());
    return value.integer();
  };
  const int64_t by = std::clamp(bound(step, 1), -n - 1, n + 1);
  if (by == 0) fail("a slice's step is 0");
  const int64_t least = by > 0 ? 0 : -1, most = by > 0 ? n : n - 1;
  const auto clamped = [&](const Value& value, int64_t absent) {
    int64_t at = bound(value, absent);
    if (value.is_undefined() || value.is_none()) return at;
    if (at < 0) at += n;
    return std::clamp(at, least, most);
  };
  const int64_t first = clamped(begin, by > 0 ? 0 : n - 1), last = clamped(end, by > 0 ? n : -1);
  std::vector<size_t> indices;
  if (by > 0)
    for (int64_t at = first; at < last; at += by) indices.push_back(static_cast<size_t>(at));
  else
    for (int64_t at = first; at > last; at += by) indices.push_back(static_cast<size_t>(at));
  return indices;
}

}  // namespace triad::chat
