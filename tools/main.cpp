// triad: one program, a verb for each job. The only catch: exit code 2 for what was asked wrongly, 1 for what failed.
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <exception>

#include "engine/check.h"
#include "tools/verbs.h"
#include "tools/version.h"

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
