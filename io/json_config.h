// Converts config structs to and from JSON through their visited fields (engine/fields.h). Every error is a UsageError
// that names the key, the value and what is allowed.
#pragma once
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/check.h"
#include "engine/fields.h"
#include "engine/process/text.h"
#include "engine/routes.h"

namespace triad {

using Json = nlohmann::ordered_json;

template <>
struct EnumWords<KernelChoice> {
  static constexpr std::pair<std::string_view, KernelChoice> words[] = {{"auto", KernelChoice::automatic},
                                                                        {"fused", KernelChoice::fused},
                                                                        {"general", KernelChoice::general},
                                                                        {"reference", KernelChoice::reference}};
};
template <class V>
void visit(KernelChoices& c, V&& v) {
  v("cmp", c.cmp, "the compressed branch", Rule{});
  v("sel", c.sel, "the selection and the selected branch", Rule{});
  v("win", c.win, "the window branch, and dense attention", Rule{});
  v("matmul", c.matmul, "matrix products", Rule{});
}

// How deep objects and lists may nest, because copying and dumping them recurses. Triad's own files are nested 3 deep.
inline constexpr int kMaxJsonDepth = 64;
enum class JsonComments { refused, allowed };
// Parses JSON text in linear time. Throws an Error that begins with `what` if the text is not JSON, is nested deeper
// than kMaxJsonDepth, or has a key twice in one object. AnyJson is Json, which keeps key order, or nlohmann::json,
// which finds a key among many in logarithmic time.
template <class AnyJson = Json>
AnyJson parse_json(std::string_view text, const std::string& what, JsonComments comments = JsonComments::refused);

// The value as JSON text, on one line if indent < 0. Bytes that are not UTF-8 become U+FFFD.
std::string dump_json(const Json& value, int indent);

// How a value's JSON text begins, for messages.
template <class AnyJson>
std::string brief(const AnyJson& value) {
  constexpr size_t kBytes = 80;
  return shortened(value.dump(-1, ' ', false, AnyJson::error_handler_t::replace), kBytes);
}

// Reads a config file: one JSON object, with // and /* */ comments. A file that is missing, empty, cut or not an object
// throws a UsageError that names it, and so does a transformers folder's config.json.
Json read_json_file(const std::string& path);
// Applies an option `--set group.key=value`, or `group.key.field=value` for a key that is an object. The value is
// parsed as JSON; if it is not JSON, it is a string, which must be UTF-8.
void set_json_key(Json& root, const std::string& assignment);

namespace json_config {

[[noreturn]] void wrong_value(const std::string& key, const Json& value, const std::string& allowed);
void read_value(const std::string& key, const Json& j, const Rule&, bool& out);
void read_value(const std::string& key, const Json& j, const Rule&, int64_t& out);
void read_value(const std::string& key, const Json& j, const Rule&, double& out);
void read_value(const std::string& key, const Json& j, const Rule&, std::string& out);
void read_value(const std::string& key, const Json& j, const Rule&, std::vector<std::string>& out);
void read_value(const std::string& key, const Json& j, const Rule&, std::vector<double>& out);  // rule: each number's
Json choices_to_json(const KernelChoices&);
template <class E>
requires std::is_enum_v<E>
void read_value(const std::string& key, const Json& j, const Rule&, E& out) {
  if (j.is_string())
    for (const auto& [word, value] : EnumWords<E>::words)
      if (j.get<std::string>() == word) return void(out = value);
  wrong_value(key, j, all_words<E>());
}

// Reads one word for all operations' kernels, or an object with a word for some of them; the others become auto.
void read_value(const std::string& key, const Json& j, const Rule&, KernelChoices& out);

// Structs with visited fields that are one key's value: an object with the fields. A struct's own header says so.
template <class T>
inline constexpr bool is_object = false;
template <class T>
requires is_object<T>
void read_value(const std::string& key, const Json& j, const Rule&, T& out);

// Reads a value, or null for none.
template <class T>
void read_value(const std::string& key, const Json& j, const Rule& rule, std::optional<T>& out) {
  out.reset();
  if (!j.is_null()) read_value(key, j, rule, out.emplace());
}
template <class T>
struct ValueOf {
  using type = T;
};
template <class T>
struct ValueOf<std::optional<T>> {
  using type = T;
};
template <class T>
inline constexpr bool is_optional = !std::is_same_v<typename ValueOf<T>::type, T>;

// Lists of structs with visited fields.
template <class T>
inline constexpr bool is_object_list = false;
template <class T>
inline constexpr bool is_object_list<std::vector<T>> = std::is_class_v<T> && !std::is_same_v<T, std::string>;
template <class T>
Json objects_to_json(const std::vector<T>& objects);
template <class T>
Json object_to_json(T object);
// Reads a list of objects, not empty, or null for an empty list. An object's absent keys have their defaults.
template <class T>
requires is_object_list<std::vector<T>>
void read_value(const std::string& key, const Json& j, const Rule&, std::vector<T>& out);

template <class T>
Json to_json(const T& value) {
  if constexpr (is_optional<T>)
    return value ? to_json(*value) : Json();
  else if constexpr (std::is_enum_v<T>)
    return std::string(word_of(value));
  else if constexpr (std::is_same_v<T, KernelChoices>)
    return choices_to_json(value);
  else if constexpr (is_object_list<T>)
    return objects_to_json(value);
  else if constexpr (is_object<T>)
    return object_to_json(value);
  else
    return value;
}

// Visitor that reads the fields in a config group. It collects the known keys, and the required keys that are absent.
struct Reader {
  const std::string& group;
  const Json& object;
  std::set<std::string> known;
  std::string missing;

  template <class T>
  void operator()(const char* name, T& field, const char*, const Rule& rule) {
    known.insert(name);
    const auto it = object.find(name);
    if (it != object.end()) {
      read_value(group + "." + name, *it, rule, field);
    } else if (rule.required) {
      missing += (missing.empty() ? "" : ", ") + group + "." + name;
    }
  }
};

// The full name (group.key) of the key that may be meant by an unknown one, wherever it is; empty: none.
using KeyHint = std::function<std::string(const std::string& key)>;
// Throws for a key that is not in `known`. elsewhere: suggests a key before the most similar one of this group.
void check_known(const std::string& group, const Json& object, const std::set<std::string>& known,
                 const KeyHint& elsewhere = {});
const Json& group_object(const Json& root, const std::string& group);

// Reads an object in a list. name: the list's key with the object's index.
template <class T>
void read_item(const std::string& name, const Json& item, T& out) {
  Reader reader{name, item, {}, {}};
  visit(out, reader);
  check_known(name, item, reader.known);
  if (!reader.missing.empty()) fail_usage("{} is {}: it lacks {}", name, brief(item), reader.missing);
}

template <class T>
requires is_object_list<std::vector<T>>
void read_value(const std::string& key, const Json& j, const Rule&, std::vector<T>& out) {
  out.clear();
  if (j.is_null()) return;
  if (!j.is_array() || j.empty()) wrong_value(key, j, "a list of objects, at least one,");
  for (const Json& item : j) {
    const std::string name = fmt::format("{}[{}]", key, out.size());
    if (!item.is_object()) wrong_value(name, item, "an object");
    read_item(name, item, out.emplace_back());
  }
}

template <class T>
requires is_object<T>
void read_value(const std::string& key, const Json& j, const Rule&, T& out) {
  if (!j.is_object()) wrong_value(key, j, "an object");
  out = {};
  read_item(key, j, out);
}

template <class T>
Json object_to_json(T object) {
  Json json = Json::object();
  visit(object, [&](const char* name, auto& field, const char*, const Rule&) { json[name] = to_json(field); });
  return json;
}

// null for an empty list. Fields that have their defaults are left out.
template <class T>
Json objects_to_json(const std::vector<T>& objects) {
  Json list;
  for (T object : objects) {
    T defaults;
    Json all = Json::object(), json = Json::object();
    visit(defaults, [&](const char* name, auto& field, const char*, const Rule&) { all[name] = to_json(field); });
    visit(object, [&](const char* name, auto& field, const char*, const Rule&) {
      if (Json value = to_json(field); value != all[name]) json[name] = std::move(value);
    });
    list.push_back(std::move(json));
  }
  return list;
}

}  // namespace json_config

// Reads one config group. require: absent required keys throw (false for the group nsa in a dense model). elsewhere:
// see check_known.
template <class Group>
void read_group(const Json& root, const std::string& name, Group& group, bool require,
                const json_config::KeyHint& elsewhere = {}) {
  const Json& object = json_config::group_object(root, name);
  json_config::Reader reader{name, object, {}, {}};
  visit(group, reader);
  json_config::check_known(name, object, reader.known, elsewhere);
  if (require && !reader.missing.empty()) fail_usage("the config lacks {}", reader.missing);
}

template <class Group>
Json group_to_json(Group& group) {
  Json out = Json::object();
  visit(group,
        [&](const char* name, auto& field, const char*, const Rule&) { out[name] = json_config::to_json(field); });
  return out;
}

}  // namespace triad
