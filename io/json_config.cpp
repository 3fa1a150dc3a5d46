#include "io/json_config.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "io/foreign_format.h"
#include "io/huggingface/model_config.h"
#include "io/json_builder.h"

#include "engine/process/did_you_mean.h"

namespace triad {

namespace {

bool is_utf8(const std::string& text) {
  try {
    Json(text).dump();  // throws if the text is not UTF-8
    return true;
  } catch (const Json::exception&) { return false; }
}

}  // namespace

template <class AnyJson>
AnyJson parse_json(std::string_view text, const std::string& what, JsonComments comments) {
  if (const std::string_view packed = packed_format(text.substr(0, kFormatBytes)); !packed.empty())
    fail("{}: is {}, no JSON", what, packed);
  // The parser takes a NUL after a value for the text's end, and so would leave out what follows.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    fail("{}: byte {} is NUL, which no JSON holds", what, nul + 1);
  return JsonBuilder<AnyJson>::build(text, what, comments);
}
template Json parse_json(std::string_view, const std::string&, JsonComments);
template nlohmann::json parse_json(std::string_view, const std::string&, JsonComments);

std::string dump_json(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

Json read_json_file(const std::string& path) {
  std::error_code unknown;
  if (std::filesystem::is_directory(path, unknown))
    fail_usage("config {}: is a folder, and a JSON file is needed", path);
  std::ifstream in(path, std::ios::binary);
  if (!in) fail_usage("config {}: cannot be opened: {}", path, std::strerror(errno));
  std::ostringstream buffer;
  buffer << in.rdbuf();
  const std::string text = buffer.str();
  if (in.bad() || text.find_first_not_of(" \t\r\n") == std::string::npos)
    fail_usage("config {}: the file is empty or unreadable", path);
  Json root;
  try {
    root = parse_json(text, "config " + path, JsonComments::allowed);
  } catch (const Error& e) { throw UsageError(e.what()); }
  if (!root.is_object()) fail_usage("config {}: a JSON object is needed, this is {}", path, root.type_name());
  if (root.contains("architectures") || root.contains("model_type")) {
    const std::string folder = std::filesystem::path(path).parent_path().string();
    fail_huggingface_folder(folder.empty() ? "." : folder);
  }
  return root;
}

void set_json_key(Json& root, const std::string& assignment) {
  const size_t equals = assignment.find('='), dot = assignment.find('.');
  if (equals == std::string::npos || dot == std::string::npos || dot > equals)
    fail_usage("--set {}: group.key=value is needed, as in train.lr=1e-4", shortened(assignment));
  const std::string group = assignment.substr(0, dot), key = assignment.substr(dot + 1, equals - dot - 1);
  const std::string text = assignment.substr(equals + 1);
  Json value;
  try {
    value = parse_json(text, assignment);
  } catch (const Error&) {
    if (!is_utf8(text)) fail_usage("{}: UTF-8 is needed", shortened(assignment));
    value = text;
  }
  if (root.contains(group) && !root[group].is_object())
    fail_usage("{} is {}, not a group of keys", shortened(group), brief(root[group]));
  const size_t second = key.find('.');
  if (second == std::string::npos) return void(root[group][key] = value);
  Json& object = root[group][key.substr(0, second)];
  if (!object.is_null() && !object.is_object())
    fail_usage("{}.{} is {}, no object with the key {}", shortened(group), shortened(key.substr(0, second)),
               brief(object), shortened(key.substr(second + 1)));
  object[key.substr(second + 1)] = value;
}

namespace json_config {

void wrong_value(const std::string& key, const Json& value, const std::string& allowed) {
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  const bool broken = text.starts_with('[') || text.starts_with('{');  // what --set passes, which is read as JSON if it
                                                                       // is
  fail_usage("{} is {}: {} is allowed{}", key, brief(value), allowed,
             broken ? "; it is a string, because it is not valid JSON" : "");
}

void read_value(const std::string& key, const Json& j, const Rule&, bool& out) {
  if (!j.is_boolean()) wrong_value(key, j, "true or false");
  out = j.get<bool>();
}

void read_value(const std::string& key, const Json& j, const Rule& rule, int64_t& out) {
  constexpr double kExact = 9007199254740992.0;  // 2^53: not every larger integer is a double
  if (!j.is_number() || std::floor(j.get<double>()) != j.get<double>() || !rule.allows(j.get<double>()))
    wrong_value(key, j, "an integer, " + rule.str() + ",");
  if (std::abs(j.get<double>()) > kExact) wrong_value(key, j, "an integer of at most 2^53");
  out = j.is_number_float() ? static_cast<int64_t>(j.get<double>()) : j.get<int64_t>();
}

void read_value(const std::string& key, const Json& j, const Rule& rule, double& out) {
  if (!j.is_number() || !std::isfinite(j.get<double>()) || !rule.allows(j.get<double>()))
    wrong_value(key, j, "a number, " + rule.str() + ",");
  out = j.get<double>();
}

void read_value(const std::string& key, const Json& j, const Rule&, std::string& out) {
  if (!j.is_string()) wrong_value(key, j, "a string");
  out = j.get<std::string>();
}

void read_value(const std::string& key, const Json& j, const Rule&, std::vector<std::string>& out) {
  const std::string allowed = "a string or a list of strings";
  out.clear();
  if (j.is_string()) return out.push_back(j.get<std::string>());
  if (!j.is_array()) wrong_value(key, j, allowed);
  for (const Json& item : j) {
    if (!item.is_string()) wrong_value(key, j, allowed);
    out.push_back(item.get<std::string>());
  }
}

void read_value(const std::string& key, const Json& j, const Rule& rule, std::vector<double>& out) {
  const std::string allowed = "a list of numbers, each " + rule.str() + ",";
  if (!j.is_array()) wrong_value(key, j, allowed);
  out.clear();
  for (const Json& item : j) {
    if (!item.is_number() || !std::isfinite(item.get<double>()) || !rule.allows(item.get<double>()))
      wrong_value(key, j, allowed);
    out.push_back(item.get<double>());
  }
}

void read_value(const std::string& key, const Json& j, const Rule& rule, KernelChoices& out) {
  if (!j.is_object()) {
    KernelChoice all;
    read_value(key, j, rule, all);
    out = KernelChoices::all(all);
    return;
  }
  out = {};
  Reader reader{key, j, {}, {}};
  visit(out, reader);
  check_known(key, j, reader.known);
}

Json choices_to_json(const KernelChoices& choices) {
  if (choices == KernelChoices::all(choices.cmp)) return std::string(word_of(choices.cmp));
  KernelChoices copy = choices;
  return group_to_json(copy);
}

void check_known(const std::string& group, const Json& object, const std::set<std::string>& known,
                 const KeyHint& elsewhere) {
  for (const auto& [key, value] : object.items())
    if (!known.contains(key)) {
      std::string all;
      for (const std::string& k : known) all += (all.empty() ? "" : ", ") + k;
      std::string hint = elsewhere ? elsewhere(key) : "";
      if (!hint.empty()) hint = "; did you mean \"" + hint + "\"?";
      if (hint.empty()) hint = did_you_mean(key, {known.begin(), known.end()}, group + ".");
      fail_usage("unknown key {}.{} (value {}); the keys of {} are {}{}", group, shortened(key), brief(value), group,
                 all, hint);
    }
}

const Json& group_object(const Json& root, const std::string& group) {
  static const Json empty = Json::object();
  const auto it = root.find(group);
  if (it == root.end()) return empty;
  if (!it->is_object()) fail_usage("{} is {}: a group of keys is needed", group, brief(*it));
  return *it;
}

}  // namespace json_config
}  // namespace triad
