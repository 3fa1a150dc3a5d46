// Builds a Config from defaults, a file, the environment and --set options; each overrides those before it.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "train/config/config.h"

namespace triad {

struct LoadedConfig {
  Config config;
  std::string name;                      // the config file's name without ".json": m7c_125m for configs/m7c_125m.json
  std::vector<std::string> environment;  // one line for each key that the environment changed, for the banner
  std::string file = {};                 // the config file's path
};

// The environment variable CONFIG, a config file's path; empty if not set.
std::string config_of_environment();
// Builds the config. path: a config file; if empty, the one that the variable CONFIG names. sets: the --set options.
// Throws UsageError.
LoadedConfig load_config(const std::string& path, const std::vector<std::string>& sets);
// Builds the config from JSON in memory instead of a file; name becomes LoadedConfig::name.
LoadedConfig load_config(Json root, const std::string& name, const std::vector<std::string>& sets);
// Parses and resolves a config, for example a checkpoint's, without the environment.
Config config_from_json(const Json& root);
Json config_to_json(const Config& config);
// The key (group.key) that ends with this name in any group, or that other trainers call so (other_names.h); empty:
// none.
// '-' equals '_'.
std::string key_named(std::string name);
// Adds to the config that an earlier run wrote the keys that did not exist then and whose default has another meaning,
// and replaces the values that are refused today.
Json with_later_keys(Json root);
// The text about config keys in `triad train --help`: every field with its default and rule.
std::string describe_config();

// Applies the environment variables NSA_* and TORCH_BACKEND to the JSON; with only_group, only those that set keys in
// this group. Returns a line for each variable applied. Throws UsageError for an unknown NSA_* variable and for
// variables that contradict each other.
std::vector<std::string> apply_environment(Json& root, std::string_view only_group = {});
// Throws if apply_environment would throw, and changes nothing.
void check_environment();

// The environment variables that env.json records: launchers', CUDA's, NCCL's, OpenMP's and Triad's. shown_value()
// replaces the value by "(set)" if the variable's name looks like a secret's (token, key, password).
Json shown_environment();
std::string shown_value(std::string_view variable, std::string_view value);

}  // namespace triad
