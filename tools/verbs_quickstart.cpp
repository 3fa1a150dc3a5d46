// Verbs in the program that tools/quickstart.sh builds first, since the whole one takes twice as long to build.
#include <CLI/CLI.hpp>

#include "tools/verbs.h"

namespace triad {

void add_verbs(CLI::App& app) {
  add_train(app);
  add_generate(app);
  app.footer("This program has the verbs of the quickstart alone; tools/build.sh builds the whole one.");
}

}  // namespace triad
