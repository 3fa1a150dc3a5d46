// Builds a Config from a file, the environment and --set, in increasing precedence: defaults, file, environment, --set.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "train/config.h"

namespace triad {

struct LoadedConfig {
  Config config;
  std::string name;                      // stem of the file: m7c_125m for configs/m7c_125m.json
  std::vector<std::string> environment;  // keys changed by the environment, a line each, for the banner
  std::string file = {};                 // path of the file
};

// The value of the environment variable CONFIG, a path; empty: not set.
std::string config_of_environment();
// An empty path means config_of_environment(). Throws UsageError.
LoadedConfig load_config(const std::string& path, const std::vector<std::string>& sets);
// The same from JSON that is in memory already; name becomes LoadedConfig::name.
LoadedConfig load_config(Json root, const std::string& name, const std::vector<std::string>& sets);
// Parses and resolves a config, without the environment (a checkpoint's config, say).
Config config_from_json(const Json& root);
Json config_to_json(const Config& config);
// The config keys for `triad train --help`: every field with its default and rule.
std::string describe_config();

// Applies the NSA_* variables and TORCH_BACKEND to the JSON (only_group: only keys of this group) and returns a line
// for each variable applied. Throws UsageError for an unknown NSA_* variable and for contradictory ones.
std::vector<std::string> apply_environment(Json& root, std::string_view only_group = {});
// Throws as apply_environment does, and changes nothing.
void check_environment();

// The environment variables that env.json records: those of launchers, CUDA, NCCL, OpenMP and Triad. shown_value
// replaces the value by "(set)" if the variable's name looks like that of a secret (token, key, password).
Json shown_environment();
std::string shown_value(std::string_view variable, std::string_view value);

}  // namespace triad
