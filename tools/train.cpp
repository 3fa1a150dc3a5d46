// triad train: trains a model from a config, or resumes a run.
#include "train/run/trainer.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "engine/check.h"
#include "tools/verbs.h"
#include "tools/version.h"
#include "train/config/load_config.h"
#include "train/config/schema.h"
#include "train/run/data_source.h"
#include "train/run/startup.h"

namespace triad {

void add_train(CLI::App& app) {
  struct Options {
    std::string config, resume;
    std::vector<std::string> sets;
    bool overwrite = false, verbose = false, accept_changed_data = false, schema = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("train", "train a model");
  verb->add_option(
      "CONFIG", o->config,
      "config file (default: with --resume RUN that run's config; else the environment variable CONFIG names it)");
  verb->add_option("--set", o->sets, "group.key=value: overrides the config file and the environment")
      ->take_all()
      ->expected(1);
  auto* resume =
      verb->add_option("--resume", o->resume,
                       "resume from a checkpoint, from the newest one of a run's folder, or from `latest`: that of "
                       "log.out_dir. `auto`: from that if there is one, else begin");
  verb->add_flag(
      "--overwrite", o->overwrite,
      "start a new run in a folder that holds one; with --resume, allow a checkpoint that is not the newest, "
      "and move what is newer aside");
  verb->add_flag("--accept-changed-data", o->accept_changed_data,
                 "with --resume: go on although texts or shards differ from those that the run had; what differs is "
                 "logged, and the order of the rows may be another")
      ->needs(resume);
  verb->add_flag("--verbose", o->verbose,
                 "also print what otherwise only ranks/rank_0.log holds: config, ranks, kernels, gradients");
  verb->add_flag("--schema", o->schema,
                 "print a JSON schema of config files, by which editors complete and check them, and train nothing");
  verb->footer(describe_config);
  const auto run = [o, resume, &app] {
    if (o->schema) return void(std::puts(config_schema().dump(2).c_str()));
    if (resume->count() > 0 && o->resume.empty())
      fail_usage("--resume is empty: a folder, `latest` or `auto` is needed");
    if (o->resume == "auto" && o->overwrite)
      fail_usage("--resume auto begins where no run is: it takes no --overwrite");
    // CONFIG, which build systems also set, redirects no --resume RUN; `latest` and `auto` need one.
    const std::string from_environment = config_of_environment();
    const bool from_run =
        !o->resume.empty() && o->config.empty() && (!means_out_dir(o->resume) || from_environment.empty());
    LoadedConfig loaded = from_run ? load_config_of_run(o->resume, o->sets) : load_config(o->config, o->sets);
    if (from_run && !from_environment.empty())
      loaded.environment.push_back(fmt::format("CONFIG={}: not used, --resume names the run", from_environment));
    // Fills in the keys that the shards' manifest determines. A resumed run's config has them already, and a complete
    // run reads no shards.
    const bool complete = complete_at(loaded.config, o->resume).has_value();
    if (!from_run && !complete)
      resolve_shards(loaded.config);
    else if (!complete)
      resolve_moved_shards(loaded.config);
    loaded.config.check_run();  // needs no data
    if (!complete) resolve_documents(loaded.config, o->resume);
    train({.config = loaded.config,
           .environment = loaded.environment,
           .resume = o->resume,
           .overwrite = o->overwrite,
           .accept_changed_data = o->accept_changed_data,
           .verbose = o->verbose,
           .build = version_text(),
           .program = app.get_name(),
           .config_file = loaded.file});
  };
  verb->callback([run] { name_rank_in_errors(run); });
}

}  // namespace triad
