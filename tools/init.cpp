// triad init: writes fresh weights as a checkpoint folder, which `triad generate`, `eval` and `grads` can read.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>

#include "engine/check.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "io/weight_index.h"
#include "tools/verbs.h"
#include "train/load_config.h"
#include "train/state.h"

namespace triad {

namespace {

// Throws an Error if the folder holds trained weights, which are in a checkpoint or in the files of a run. Fresh
// weights may be replaced.
void refuse_trained(const std::string& folder) {
  for (const std::string& name :
       {whole_file_name(kMomentsStem), index_file_name(kMomentsStem), std::string("env.json")})
    if (std::filesystem::exists(folder + "/" + name))
      fail("{} holds {}: fresh weights would replace trained ones; choose another --out", folder, name);
  const std::string file = folder + "/" + kStateFile;
  if (!std::filesystem::exists(file)) return;
  const Json state = parse_json(read_file(file), file), step = state.is_object() ? state.value("step", Json()) : Json();
  if (step != 0)
    fail("{} is of step {}: fresh weights would replace trained ones; choose another --out", file, brief(step));
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
  verb->add_option("--out", o->out, "folder to write")->required();
  verb->callback([o] {
    const Config config = load_config(o->config, o->sets).config;
    refuse_trained(o->out);
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
