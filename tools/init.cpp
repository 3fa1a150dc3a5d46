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

[[noreturn]] void refuse(const std::string& folder, const std::vector<std::string>& others) {
  fail(
      "{} holds a model that `triad init` has not made, or which changed since ({}): fresh weights would replace it; "
      "choose another --out",
      folder, listed(others));
}

// Whether a `triad init` that was killed may have left this file: the same tokenizer, or weights, which save_initial()
// compares with the fresh ones.
bool may_be_left(const std::string& folder, const std::string& name, const std::vector<Tokenizer::File>& tokenizer) {
  const std::string path = folder + "/" + name;
  if (is_link_or_mount(path)) return false;
  if (name == whole_file_name(kWeightsStem)) return is_own_tensor_file(path);
  return std::ranges::any_of(tokenizer, [&](const Tokenizer::File& file) {
    return file.name == name && std::filesystem::is_regular_file(path) && read_file(path) == file.content;
  });
}

// Throws an Error that lists the files of a model in the folder that `triad init` has not made. Its own may be
// replaced.
void refuse_others(const std::string& folder, const std::vector<Tokenizer::File>& tokenizer) {
  std::vector<std::string> others;
  bool all_left = true;  // a `triad init` that was killed may have left them all
  std::error_code absent;
  for (const std::filesystem::directory_entry& entry : std::filesystem::directory_iterator(folder, absent)) {
    const std::string name = entry.path().filename().string();
    if (!is_part_of_model(name) || is_initial_file(folder, name)) continue;
    others.push_back(name);
    all_left = all_left && may_be_left(folder, name, tokenizer);
  }
  if (is_huggingface_folder(folder)) others.push_back("config.json"), all_left = false;
  std::sort(others.begin(), others.end());
  if (!all_left) refuse(folder, others);
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
    refuse_others(o->out, open_tokenizer(config.data)->files());
    Arena counted = Arena::planned(Device::cpu());
    Params(counted, config.model, {});
    Runtime runtime({.device = Device::cpu(), .arena_bytes = counted.used_bytes()});
    Params params(runtime.arena(), config.model, {});
    params.init(runtime.ctx(), static_cast<uint64_t>(config.train.seed));
    if (!save_initial(runtime.ctx(), o->out, params, config)) refuse(o->out, {whole_file_name(kWeightsStem)});
    fmt::print("{}: {} parameters in {} tensors\n", o->out, count_parameters(config.model), params.count());
  });
}

}  // namespace triad
