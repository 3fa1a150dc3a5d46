// The program's verbs. Each function adds a subcommand to the app; the subcommand's callback runs the verb and throws
// an Error, or a UsageError for a wrong command line.
#pragma once

namespace CLI {
class App;
}

namespace triad {

// Adds every verb in this program: all (verbs.cpp), or the quickstart's (verbs_quickstart.cpp).
void add_verbs(CLI::App& app);

void add_train(CLI::App& app);
void add_generate(CLI::App& app);
void add_chat(CLI::App& app);
void add_eval(CLI::App& app);
void add_score(CLI::App& app);
void add_tokenizer(CLI::App& app);
void add_data(CLI::App& app);
void add_init(CLI::App& app);
void add_import(CLI::App& app);
void add_export(CLI::App& app);
void add_grads(CLI::App& app);
void add_bench(CLI::App& app);
void add_plan(CLI::App& app);
void add_inspect(CLI::App& app);
void add_report(CLI::App& app);
void add_doctor(CLI::App& app);
void add_completion(CLI::App& app);

}  // namespace triad
