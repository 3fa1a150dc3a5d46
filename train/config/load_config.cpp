#include "train/config/load_config.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <set>

#include "engine/process/did_you_mean.h"
#include "io/data/shard_manifest.h"
#include "io/tokenizer/tokenizer.h"
#include "train/config/config_fields.h"
#include "train/config/other_names.h"

namespace triad {

void read_value(const std::string& key, const Json& j, const Rule&, std::vector<DataComponent>& out) {
  constexpr const char* kAllowed = "a string or a list of strings and objects";
  out.clear();
  const std::string text = j.is_string() ? j.get<std::string>() : "";
  const bool broken =
      text.starts_with("[{") || text.starts_with("[\"") || text.starts_with("{");  // a list, but no JSON
  if (broken || (!j.is_string() && !j.is_array())) json_config::wrong_value(key, j, kAllowed);
  std::optional<size_t> strings;  // the component of the strings
  int64_t index = 0;
  for (const Json& item : j.is_string() ? Json::array({j}) : j) {
    const std::string name = fmt::format("{}[{}]", key, index++);
    if (item.is_string()) {
      if (!strings) {
        strings = out.size();
        out.emplace_back();
      }
      out[*strings].path.push_back(item.get<std::string>());
    } else if (item.is_object()) {
      json_config::read_item(name, item, out.emplace_back());
      if (out.back().path.empty()) json_config::wrong_value(name + ".path", item["path"], "a path or a list of paths");
    } else {
      json_config::wrong_value(name, item, "a string or an object");
    }
  }
}

Json objects_to_json(const std::vector<DataComponent>& components) {
  if (components.empty()) return Json::array();
  Json objects = json_config::objects_to_json<DataComponent>(components);
  const bool strings = objects.size() == 1 && objects.front().size() == 1;
  return strings ? objects.front()["path"] : objects;
}

std::string config_of_environment() {
  const char* const named = std::getenv("CONFIG");
  return named == nullptr ? "" : named;
}

LoadedConfig load_config(const std::string& path, const std::vector<std::string>& sets) {
  const std::string file = path.empty() ? config_of_environment() : path;
  if (file.empty()) fail_usage("no config: name a file, or set the environment variable CONFIG");
  Json root;
  try {
    root = read_json_file(file);
  } catch (const Error& e) {
    if (!path.empty()) throw;
    fail_usage("{} (the environment variable CONFIG names it)", e.what());
  }
  LoadedConfig loaded = load_config(std::move(root), std::filesystem::path(file).stem().string(), sets);
  loaded.file = file;
  return loaded;
}

namespace {

// The environment variables that have set a key which the text of an error names, unless --set has set it since:
// " (set by the environment: NSA_FORCE_BRANCH=win)"; empty without any. environment: as apply_environment() returns it.
std::string by_variables(const std::string& text, const std::vector<std::string>& environment,
                         const std::vector<std::string>& sets) {
  std::string by;
  for (const std::string& line : environment) {
    constexpr std::string_view kArrow = " -> ";
    const size_t arrow = line.rfind(kArrow);
    if (arrow == std::string::npos) continue;
    const std::string key = line.substr(arrow + kArrow.size());
    const bool overridden = std::ranges::any_of(sets, [&](const auto& set) { return set.starts_with(key + "="); });
    const size_t at = text.find(key), end = at + key.size();
    const bool names = at != std::string::npos &&
                       (end == text.size() || text.find_first_of("abcdefghijklmnopqrstuvwxyz_", end) != end);
    if (overridden || !names) continue;
    by += fmt::format("{}{}", by.empty() ? " (set by the environment: " : ", ", line.substr(0, arrow));
  }
  return by.empty() ? by : by + ")";
}

}  // namespace

LoadedConfig load_config(Json root, const std::string& name, const std::vector<std::string>& sets) {
  LoadedConfig loaded{.config = {}, .name = name, .environment = {}, .file = {}};
  loaded.environment = apply_environment(root);
  for (const std::string& assignment : sets) {
    const size_t equals = assignment.find('=');
    if (const std::string key = equals < assignment.find('.') ? key_named(assignment.substr(0, equals)) : "";
        !key.empty())
      fail_usage("--set {}: group.key=value is needed; did you mean {}{}?", shortened(assignment), key,
                 shortened(assignment.substr(equals)));
    set_json_key(root, assignment);
  }
  try {
    loaded.config = config_from_json(root);
  } catch (const UsageError& e) { fail_usage("{}{}", e.what(), by_variables(e.what(), loaded.environment, sets)); }
  return loaded;
}

namespace {

// Adds the train.steps that a config with train.stages leaves out, or has as null: their steps summed. Malformed steps
// count as 0, and their stage's error follows.
Json with_steps(Json root) {
  const auto has = [](const Json& object, const char* key) {
    return object.is_object() && object.contains(key) && !object[key].is_null();
  };
  if (!has(root, "train") || !has(root["train"], "stages") || has(root["train"], "steps")) return root;
  constexpr double kMost = 9007199254740992.0;  // 2^53
  double all = 0;
  for (const Json& stage : root["train"]["stages"]) {
    const double steps = has(stage, "steps") && stage["steps"].is_number() ? stage["steps"].get<double>() : 0;
    if (steps == std::floor(steps) && steps >= 0 && steps <= kMost) all += steps;
  }
  root["train"]["steps"] = all;
  return root;
}

// Throws for a key in nsa.layers that cannot differ between layers, and for an entry whose branches need a key that
// neither it nor the group has.
void check_nsa_layers(const Json& root) {
  const Json group = json_config::group_object(root, "nsa");
  if (!group.contains("layers") || !group["layers"].is_array()) return;  // the group's reader explains other values
  const auto keys_of = [](auto fields) {
    std::set<std::string> keys;
    visit(fields, [&](const char* name, auto&, const char*, const Rule&) { keys.insert(name); });
    return keys;
  };
  const std::set<std::string> all = keys_of(NsaGroup()), may_differ = keys_of(NsaLayers());
  for (size_t i = 0; i < group["layers"].size(); ++i) {
    const Json& entry = group["layers"][i];
    if (!entry.is_object()) return;
    const std::string name = fmt::format("nsa.layers[{}]", i);
    for (const auto& [key, value] : entry.items())
      if (all.contains(key) && !may_differ.contains(key))
        fail_usage("{}.{} is {}: this key cannot differ between layers; nsa.{} sets it for all", name, shortened(key),
                   brief(value), shortened(key));
    const auto given = [](const Json& object, const char* key) {
      return object.contains(key) && !object[key].is_null();
    };
    const Json branches = given(entry, "branches")   ? entry["branches"]
                          : given(group, "branches") ? group["branches"]
                                                     : Json(std::string(word_of(Branches::all)));
    const auto need = [&](std::initializer_list<const char*> keys) {
      for (const char* key : keys)
        if (!given(entry, key) && !given(group, key))
          fail_usage("{} is {}: with branches {} it needs {}, or the group needs nsa.{}", name, brief(entry),
                     brief(branches), key, key);
    };
    if (branches != word_of(Branches::window)) need({"l_sel", "n_sel"});
    if (branches == word_of(Branches::all)) need({"l", "d"});
    if (branches != word_of(Branches::selected)) need({"w"});
  }
}

// What an absent model.vocab_size stands for: the data's vocabulary.
int64_t vocabulary_of(const DataConfig& data) {
  constexpr const char* kLacks = "the config lacks model.vocab_size";
  if (data.kind != DataKind::text && data.kind != DataKind::shards)
    fail_usage("{}: data of kind {} has no tokenizer, whose vocabulary it would be", kLacks, word_of(data.kind));
  int64_t vocabulary = 0;
  if (data.kind == DataKind::shards && !data.components.empty())
    for (const ShardManifest& manifest : find_manifests(expand_shards(data.paths(), ShardSplit::train)).manifests)
      vocabulary = std::max(vocabulary, manifest.vocab_size);
  if (vocabulary == 0 && data.kind == DataKind::shards && data.tokenizer.empty())
    fail_usage("{}: no manifest.json lists the shards {}, and data.tokenizer is not set", kLacks,
               brief(objects_to_json(data.components)));
  if (vocabulary == 0) vocabulary = open_tokenizer(data)->vocab_size();
  if (vocabulary < 2) fail_usage("{}: data.tokenizer {} has {} tokens", kLacks, data.tokenizer, vocabulary);
  return vocabulary;
}

}  // namespace

std::string key_named(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  Config config;
  std::string found;
  visit_groups(config, [&](const std::string& group_name, auto& group) {
    visit(group, [&](const char* key, auto&, const char*, const Rule&) {
      if (found.empty() && key == name) found = group_name + "." + key;
    });
  });
  for (const auto& [other, key] : kOtherNames)
    if (found.empty() && other == name) found = key;
  return found;
}

Config config_from_json(const Json& without_steps) {
  const Json root = with_steps(without_steps);
  Config config;
  std::vector<std::string> groups;
  visit_groups(config, [&](const std::string& name, auto&) { groups.push_back(name); });
  for (const auto& [group, value] : root.items())
    if (group != "$schema" && std::find(groups.begin(), groups.end(), group) == groups.end())  // an editor's (schema.h)
      fail_usage("unknown group {}; the groups are model, nsa, data, train, runtime, dist, log{}", shortened(group),
                 did_you_mean(group, groups));
  visit_groups(config, [&](const std::string& name, auto& group) {
    if (name == "nsa" && config.model.has_nsa()) check_nsa_layers(root);
    read_group(root, name, group, name != "nsa" || config.model.has_nsa(), key_named);
  });
  if (config.model.vocab_size == 0) config.model.vocab_size = vocabulary_of(config.data);
  config.resolve();
  return config;
}

Json with_later_keys(Json root) {
  const auto group = [&](const char* name) -> Json* {
    return root.is_object() && root.contains(name) && root[name].is_object() ? &root[name] : nullptr;
  };
  if (Json* const data = group("data"); data != nullptr && !data->contains("documents"))
    (*data)["documents"] = word_of(DocumentScope::attend_across);
  // Rows were consecutive tokens before there was another packing.
  if (Json* const data = group("data"); data != nullptr && !data->contains("packing"))
    (*data)["packing"] = word_of(Packing::stream);
  // False was allowed once, with the same results.
  if (Json* const runtime = group("runtime"); runtime != nullptr && runtime->contains("deterministic"))
    (*runtime)["deterministic"] = true;
  return root;
}

Json config_to_json(const Config& config) {
  Config copy = config;
  Json root = Json::object();
  visit_groups(copy, [&](const std::string& name, auto& group) { root[name] = group_to_json(group); });
  return root;
}

std::string describe_config() {
  Config defaults;
  std::string out = "Config keys (file, --set group.key=value):\n";
  visit_groups(defaults, [&](const std::string& group, auto& fields) {
    // Adds one key's help line: its name, help, allowed values, and that it is required, or else its default.
    const auto add = [&]<class Field>(const std::string& key, const Field&, const char* help, const Rule& rule,
                                      const std::string& default_text) {
      using T = typename json_config::ValueOf<Field>::type;
      std::string allowed;
      if constexpr (std::is_enum_v<T>)
        allowed = "; " + all_words<T>();
      else if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, double>)
        allowed = "; " + rule.str();
      out += fmt::format("  {:<32} {}{}{}\n", group + "." + key, help, allowed,
                         rule.required ? "; required" : default_text);
    };
    visit(fields, [&](const std::string& name, auto& field, const char* help, const Rule& rule) {
      using T = std::decay_t<decltype(field)>;
      add(name, field, help, rule, "; default " + json_config::to_json(field).dump());
      if constexpr (json_config::is_object_list<T>) {
        typename T::value_type item;  // defaults come from other keys, or are in the help
        visit(item, [&](const std::string& key, auto& part, const char* text, const Rule& limit) {
          add(name + "[]." + key, part, text, limit, "");
        });
      } else if constexpr (json_config::is_object<typename json_config::ValueOf<T>::type>) {
        typename json_config::ValueOf<T>::type object;
        visit(object, [&](const std::string& key, auto& part, const char* text, const Rule& limit) {
          add(name + "." + key, part, text, limit, "; default " + json_config::to_json(part).dump());
        });
      }
    });
  });
  return out;
}

}  // namespace triad
