// The program triad: parses the command line and runs a verb. Errors are caught here and give exit code 2 (usage) or 1
// (failure); once a training run has started, the trainer handles its own errors. If the program that reads standard
// output has ended (`| head`), a verb ends silently with SIGPIPE's exit code, but a training run, whose results are
// files, continues and ends with 0.
#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "engine/check.h"
#include "engine/process/did_you_mean.h"
#include "engine/process/dump_request.h"
#include "engine/process/help_text.h"
#include "engine/process/progress_line.h"
#include "engine/process/text.h"
#include "engine/process/tone.h"
#include "kernels/common/blas_core.h"
#include "tools/verbs.h"
#include "tools/version.h"
#include "train/config/load_config.h"

namespace {

// Throws an error that names an unknown verb; CLI11 only reports that a verb is required.
void check_verb(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::vector<std::string> verbs;
  for (const CLI::App* verb : app.get_subcommands({})) {
    if (verb->get_name() == argv[1]) return;
    verbs.push_back(verb->get_name());
  }
  triad::fail_usage("unknown verb \"{}\"; the verbs are {}{}", argv[1], fmt::join(verbs, ", "),
                    triad::did_you_mean(argv[1], verbs));
}

// A usage error's text: CLI11's message, and for each unknown option the most similar known one, because a required
// option may be missing only because its name is misspelt.
std::string failure_text(const CLI::App* app, const CLI::Error& error) {
  std::string text = CLI::FailureMessage::simple(app, error);
  if (const size_t line = text.find('\n'); line != std::string::npos)
    text = triad::toned(STDERR_FILENO, triad::Tone::error, text.substr(0, line)) + text.substr(line);
  std::vector<const CLI::App*> parsed = {app};  // then the verb, then its own verb
  for (size_t i = 0; i < parsed.size(); ++i)
    for (const CLI::App* verb : parsed[i]->get_subcommands()) parsed.push_back(verb);
  std::vector<std::string> options;
  for (const CLI::Option* option : parsed.back()->get_options())
    for (const std::string& name : option->get_lnames()) options.push_back("--" + name);
  for (const CLI::App* each : parsed)
    for (const std::string& extra : each->remaining()) {
      if (!extra.starts_with("-")) continue;
      const std::string name = extra.substr(0, extra.find('='));
      std::string hint = triad::did_you_mean(name, options);
      // A config key is no option of its own.
      if (const std::string key = triad::key_named(name.substr(std::min<size_t>(2, name.size())));
          hint.empty() && !key.empty() && std::find(options.begin(), options.end(), "--set") != options.end())
        hint = "; did you mean --set " + key + "=VALUE?";
      if (!hint.empty()) text += "triad: " + extra + hint + "\n";
    }
  return text;
}

// Keeps requests for a stack dump (SIGUSR1) that arrive early, because the signal's default action would end the
// process. This runs before library constructors, some of which take long. Sanitizers do not work so early.
#ifndef __SANITIZE_ADDRESS__
void keep_early_requests(int, char**, char**) { triad::keep_dump_requests(); }
[[gnu::section(".preinit_array"), gnu::used]] void (*at_first_instruction)(int, char**, char**) = keep_early_requests;
#endif

// A command line, with `help VERB ...` as `VERB ... --help`, and without the topic in `VERB ... --help TOPIC`.
struct HelpRequest {
  std::vector<char*> arguments;
  std::string topic;  // empty: all
};
HelpRequest help_request(int argc, char** argv) {
  static char option[] = "--help";
  HelpRequest request{{argv, argv + argc}, {}};
  std::vector<char*>& all = request.arguments;
  if (argc > 1 && std::strcmp(argv[1], "help") == 0) {
    all.erase(all.begin() + 1);
    all.push_back(option);
  } else if (argc > 3 && std::strcmp(all[all.size() - 2], option) == 0 && all.back()[0] != '-') {
    request.topic = all.back();
    all.pop_back();
  }
  return request;
}

void print_help(const std::string& help, const std::string& topic) {
  const std::string text = topic.empty() ? help : triad::help_about(help, topic);
  const bool terminal = triad::is_terminal(STDOUT_FILENO);
  std::fputs((terminal ? triad::wrapped(text, triad::terminal_columns(STDOUT_FILENO)) : text).c_str(), stdout);
}

constexpr int kReaderGone = 128 + SIGPIPE;  // exit code that a shell reports for a program that SIGPIPE ended

// Whether a write to standard output failed because it is a pipe that nothing reads any more.
bool reader_is_gone() {
  pollfd output{.fd = STDOUT_FILENO, .events = 0, .revents = 0};
  return std::ferror(stdout) != 0 && poll(&output, 1, 0) == 1 && (output.revents & (POLLERR | POLLHUP)) != 0;
}

int ended_by(const std::exception& e, int exit_code) {
  if (std::strstr(e.what(), std::strerror(EPIPE)) != nullptr && reader_is_gone()) return kReaderGone;
  triad::print_problem(triad::Tone::error, triad::printable_lines(e.what()));
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  triad::keep_dump_requests();
  triad::use_better_blas_core(argv);
  // These signals are ignored, so that a write past the file size limit, or to a pipe without a reader, is a write(2)
  // error like a full disk. A run whose output was piped to `head` then continues.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  CLI::App app("Triad: a trainer for language models with Native Sparse Attention");
  app.set_version_flag("--version", triad::version_and_parts);
  app.require_subcommand(1);
  app.failure_message(failure_text);
  triad::add_verbs(app);
  HelpRequest request = help_request(argc, argv);
  try {
    const int count = static_cast<int>(request.arguments.size());
    check_verb(app, count, request.arguments.data());
    try {
      app.parse(count, request.arguments.data());
    } catch (const CLI::CallForHelp&) { print_help(app.help(), request.topic); }
  } catch (const CLI::ParseError& e) {
    constexpr int kUsage = 2;
    if (app.exit(e) != 0) return kUsage;  // 0 after --version
  } catch (const triad::UsageError& e) { return ended_by(e, 2); } catch (const std::exception& e) {
    return ended_by(e, 1);
  }
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return 0;
  if (reader_is_gone()) return app.got_subcommand("train") ? 0 : kReaderGone;
  triad::print_problem(triad::Tone::error, "standard output could not be written completely");
  return 1;
}
