// All verbs, in `triad --help` order.
#include "tools/verbs.h"

namespace triad {

void add_verbs(CLI::App& app) {
  add_train(app);
  add_generate(app);
  add_chat(app);
  add_eval(app);
  add_score(app);
  add_tokenizer(app);
  add_data(app);
  add_init(app);
  add_import(app);
  add_export(app);
  add_grads(app);
  add_bench(app);
  add_plan(app);
  add_inspect(app);
  add_report(app);
  add_doctor(app);
  add_completion(app);
}

}  // namespace triad
