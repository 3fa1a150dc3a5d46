// triad init: writes fresh weights as a checkpoint folder, which `triad generate`, `eval` and `grads` can read.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "engine/check.h"
#include "io/checkpoint.h"
#include "io/huggingface/model_config.h"
#include "io/own_files.h"
#include "io/weight_index.h"
#include "tools/verbs.h"
#include "train/checkpoint/state.h"
#include "train/config/load_config.h"

namespace triad {

namespace {

// Whether a file by this name is weights, or describes the weights in its folder.
bool is_part_of_model(const std::string& name) {
  return name == kStateFile || name == "env.json" || is_tokenizer_file_name(name) ||
         is_tensor_file_name(name, kWeightsStem) || is_tensor_file_name(name, kMomentsStem) ||
         name.ends_with(".safetensors") || name.starts_with("pytorch_model") || name == "checkpoints";
}

// Throws an Error that lists model files in the folder that `triad init` has not made. Its own may be replaced.
void refuse_others(const std::string& folder) {
  std::vector<std::string> others;
  std::error_code absent;
  for (const std::filesystem::directory_entry& entry : std::filesystem::directory_iterator(folder, absent)) {
    const std::string name = entry.path().filename().string();
    if (is_part_of_model(name) && !is_initial_file(folder, name)) others.push_back(name);
  }
  if (is_huggingface_folder(folder)) others.push_back("config.json");
  std::sort(others.begin(), others.end());
  if (!others.empty())
    fail(
        "{} holds a model that `triad init` has not made, or which changed since ({}): fresh weights would replace it; "
        "choose another --out",
        folder, listed(others));
}

}  // namespace

void add_init(CLI::App& app) {
  struct Options {
    std::string config, out;
    std::vector<std::string> sets;
  };
  auto o = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("init", "write fresh weights: DIR/model.safetensors and DIR/state.json");
  verb->add_option("CONFIG", o->config, "config file (default: the environment variable CONFIG names it)");
  verb->add_option("--set", o->sets, "group.key=value: overrides the config file and the environment")
      ->take_all()
      ->expected(1);
  verb->add_option("--out", o->out, "folder to write; only what `triad init` has made there is replaced")->required();
  verb->callback([o] {
    const Config config = load_config(o->config, o->sets).config;
    refuse_others(o->out);
    Arena counted = Arena::planned(Device::cpu());
    Params(counted, config.model, {});
    Runtime runtime({.device = Device::cpu(), .arena_bytes = counted.used_bytes()});
    Params params(runtime.arena(), config.model, {});
    params.init(runtime.ctx(), static_cast<uint64_t>(config.train.seed));
    save_initial(runtime.ctx(), o->out, params, config);
    fmt::print("{}: {} parameters in {} tensors\n", o->out, count_parameters(config.model), params.count());
  });
}

}  // namespace triad
