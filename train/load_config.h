// From a file, the environment and --set to a Config: defaults < file < environment < --set.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "train/config.h"

namespace triad {

struct LoadedConfig {
  Config config;
  std::string name;                      // of its file: m7c_125m of configs/m7c_125m.json
  std::vector<std::string> environment;  // what the environment changed, a line each, for the banner
  std::string file = {};                 // its path
};

// The file that the environment variable CONFIG names; empty: none.
std::string config_of_environment();
// path empty: config_of_environment(). Throws UsageError.
LoadedConfig load_config(const std::string& path, const std::vector<std::string>& sets);
// From JSON that is there already, of a run by this name.
LoadedConfig load_config(Json root, const std::string& name, const std::vector<std::string>& sets);
// A config that is already JSON (a checkpoint's), resolved.
Config config_from_json(const Json& root);
Json config_to_json(const Config& config);
// The text of `triad train --help` on the keys: every field with its default and rule.
std::string describe_config();

// The environment's part: NSA_* variables into the JSON (only_group given: those of that group alone). An unknown NSA_*
// variable is an error. Returns a line for each that was honoured.
std::vector<std::string> apply_environment(Json& root, std::string_view only_group = {});
// The errors alone.
void check_environment();

// What env.json shows of the environment: the variables of launchers, CUDA, NCCL, OpenMP and ours, by name. Of one
// whose name tells of a secret (a token, a key, a password) that it is set, and not its value.
Json shown_environment();
std::string shown_value(std::string_view variable, std::string_view value);

}  // namespace triad
