// triad train: from a config to a trained model.
#include "train/trainer.h"

#include <CLI/CLI.hpp>
#include <memory>

#include "engine/check.h"
#include "tools/verbs.h"
#include "tools/version.h"
#include "train/load_config.h"

namespace triad {

void add_train(CLI::App& app) {
  struct Options {
    std::string config, resume;
    std::vector<std::string> sets;
    bool overwrite = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("train", "train a model");
  verb->add_option("CONFIG", o->config, "config file (else the environment variable CONFIG)");
  verb->add_option("--set", o->sets, "group.key=value, over file and environment")->take_all()->expected(1);
  auto* resume =
      verb->add_option("--resume", o->resume, "go on from a checkpoint, a run folder, or `latest` in log.out_dir");
  verb->add_flag("--overwrite", o->overwrite, "start anew in a folder that holds a checkpoint")->excludes(resume);
  verb->footer(describe_config);
  verb->callback([o, resume] {
    if (resume->count() > 0 && o->resume.empty()) fail_usage("--resume is empty: a folder, or `latest`, is needed");
    LoadedConfig loaded = load_config(o->config, o->sets);
    loaded.config.check_run();
    train({.config = loaded.config,
           .environment = loaded.environment,
           .resume = o->resume,
           .overwrite = o->overwrite,
           .build = version_text(),
           .config_file = loaded.file});
  });
}

}  // namespace triad
