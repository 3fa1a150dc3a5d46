// triad: one program, a verb for each job. The only catch: exit code 2 for what was asked wrongly, 1 for what failed.
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <exception>

#include "engine/check.h"
#include "tools/verbs.h"
#include "tools/version.h"

namespace {

// CLI11 says of an unknown verb only that one is required.
void check_verb(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::string verbs;
  for (const CLI::App* verb : app.get_subcommands({})) {
    if (verb->get_name() == argv[1]) return;
    verbs += (verbs.empty() ? "" : ", ") + verb->get_name();
  }
  triad::fail_usage("unknown verb \"{}\"; the verbs are {}", argv[1], verbs);
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a write past the file size limit is an error with a message, as on a full disk
  CLI::App app("Triad: a trainer for language models with Native Sparse Attention");
  app.set_version_flag("--version", triad::version_text());
  app.require_subcommand(1);
  triad::add_train(app);
  triad::add_generate(app);
  triad::add_eval(app);
  triad::add_data(app);
  triad::add_init(app);
  triad::add_grads(app);
  triad::add_bench(app);
  triad::add_inspect(app);
  try {
    check_verb(app, argc, argv);
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    constexpr int kUsage = 2;
    return app.exit(e) == 0 ? 0 : kUsage;
  } catch (const triad::UsageError& e) {
    std::fprintf(stderr, "triad: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "triad: %s\n", e.what());
    return 1;
  }
  return 0;
}
