// Output on a terminal: how many lines precede the first step, progress lines that fit into the width and stay intact,
// rates, heartbeats that become rarer; and suggestions for misspelled words.
#include <cmath>
#include <filesystem>
#include <sstream>

#include "engine/process/did_you_mean.h"
#include "engine/process/progress_line.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/monitor/banner.h"
#include "train/monitor/pace.h"

using namespace triad;
using namespace triad::test;

namespace {

bool require_script() {
  if (run_command("script -qec true /dev/null </dev/null").exit_code == 0) return true;
  return skip("no script(1), which makes a terminal");
}

// Runs `triad ARGS` on a terminal with this many columns.
Outcome on_terminal(const TemporaryFolder& folder, int columns, const std::string& args) {
  write_text(folder.file("command"),
             fmt::format("stty cols {}\nNO_COLOR=1 exec {} {}\n", columns, TRIAD_PROGRAM, args));
  return run_command("script -qec 'sh " + folder.file("command") + "' /dev/null </dev/null");
}

// The lines that a terminal shows for these bytes: each line's final state, and every state that it had.
struct Shown {
  std::vector<std::string> lines, states;
};
Shown shown(const std::string& bytes) {
  Shown out;
  std::istringstream in(bytes);
  for (std::string line; std::getline(in, line);) {
    while (line.ends_with('\r')) line.pop_back();
    std::string last;
    std::istringstream parts(line);
    for (std::string part; std::getline(parts, part, '\r');) {
      const std::string erase = "\x1b[2K";
      const bool erases = part.starts_with(erase);
      const std::string text = erases ? part.substr(erase.size()) : part;
      last = erases || text.size() >= last.size() ? text : text + last.substr(text.size());
      out.states.push_back(last);
    }
    out.lines.push_back(last);
  }
  return out;
}

std::string terminal_args(const TemporaryFolder& folder, const std::string& more) {
  return "train " + kTiny + " --set runtime.device=cpu --set log.out_dir=" + folder.file("run") + " " + more;
}

}  // namespace

TEST_CASE("terminal: a misspelled word gives the nearest valid words", "[terminal]") {
  CHECK(edit_distance("", "abc") == 3);
  CHECK(edit_distance("kitten", "sitting") == 3);
  CHECK(edit_distance("ab", "ba") == 1);  // swapping adjacent letters is one edit
  CHECK(edit_distance("train", "train") == 0);
  const std::vector<std::string> verbs = {"train", "generate", "eval", "data"};
  CHECK(did_you_mean("trian", verbs) == "; did you mean \"train\"?");
  CHECK(did_you_mean("EVAL", verbs) == "; did you mean \"eval\"?");
  CHECK(did_you_mean("gener", verbs) == "; did you mean \"generate\"?");
  CHECK(did_you_mean("lrr", {"lr", "eps"}, "train.") == "; did you mean \"train.lr\"?");
  CHECK(did_you_mean("--prompt-fil", {"--prompt", "--prompt-file"}) == "; did you mean \"--prompt-file\"?");
  CHECK(did_you_mean("x", {"w", "l"}).empty());  // no letter in common
  CHECK(did_you_mean("something", verbs).empty());
  CHECK(did_you_mean("", verbs).empty());
  CHECK(did_you_mean(std::string(1 << 20, 'x'), verbs).empty());
}

TEST_CASE("terminal: a progress line fits, and drops its least important parts first", "[terminal]") {
  const LinePiece pieces[] = {{"step 3/9", 0}, {"lr 1", 2}, {"loss 2", 0}, {"eta 5s", 1}};
  CHECK(fit_line(pieces, 80) == "step 3/9  lr 1  loss 2  eta 5s");
  CHECK(fit_line(pieces, 30) == "step 3/9  lr 1  loss 2  eta 5s");
  CHECK(fit_line(pieces, 29) == "step 3/9  loss 2  eta 5s");
  CHECK(fit_line(pieces, 23) == "step 3/9  loss 2");
  CHECK(fit_line(pieces, 10) == "step 3/9  ");
  CHECK(cut_line("12345678", 8) == "12345678");
  CHECK(cut_line("123456789", 8) == "12345...");
  CHECK(cut_line("123456789", 2) == "12");
}

TEST_CASE("terminal: a rate is the median of all steps since the last row", "[terminal]") {
  StepTimes times;
  CHECK(times.median_ms() == 0);
  // The first step includes one-time preparations.
  for (const double ms : {70.0, 50.0, 51.0, 49.0, 52.0}) times.add(ms);
  CHECK(times.median_ms() == 51);
  times.row();
  times.add(0.9);  // a run's last step, whose result is available immediately
  CHECK(times.median_ms() == 50);
  times.row();
  for (int i = 0; i < 100; ++i) times.add(i < 60 ? 10 : 1000);
  CHECK(times.median_ms() == 10);  // a median over several steps, not the last one alone
}

TEST_CASE("terminal: heartbeats become rarer by default, or are as frequent as configured", "[terminal]") {
  const auto count = [](int64_t every, int64_t steps, double seconds) {
    int64_t due = 0;
    double since = 0;
    for (int64_t step = 1; step <= steps; ++step) {
      since += seconds;
      if (heartbeat_due(every, step, since)) ++due, since = 0;
    }
    return due;
  };
  CHECK(count(-1, 1000, 0.01) == 1000);
  CHECK(count(-1, 10000, 0) == 1000 + 900);
  CHECK(count(-1, 1000000, 0) == 1000 + 3 * 900);
  CHECK(count(-1, 3000, 61) == 3000);  // one heartbeat a minute or more
  CHECK(count(1, 20000, 0.01) == 20000);
  CHECK(count(7, 70, 100) == 10);
  CHECK(count(0, 70, 100) == 0);
  CHECK(heartbeat_due(-1, int64_t{1} << 62, 60));
}

TEST_CASE("terminal: durations and numbers in readable units", "[terminal]") {
  CHECK(duration_text(59.9) == "59s");
  CHECK(duration_text(65) == "1m05s");
  CHECK(duration_text(7800) == "2h10m");
  CHECK(duration_text(100 * 3600) == "4d04h");
  CHECK(duration_text(std::nan("")) == "0s");
  CHECK(grouped(7) == "7");
  CHECK(grouped(-123) == "-123");
  CHECK(grouped(1234567) == "1,234,567");
  CHECK(grouped(-100000) == "-100,000");
}

TEST_CASE("terminal: at most 13 lines before the first step say what is trained, the rest is in the log",
          "[terminal]") {
  const TemporaryFolder folder;
  const std::string more =
      "--set train.save_every=10 --set train.keep_every=10 --set runtime.cuda_graph=true --overwrite ";
  const Outcome usual = run_program(terminal_args(folder, more), "NSA_LR=0.002 NSA_ACCUM=2");
  INFO(usual.output);
  REQUIRE(usual.exit_code == 0);
  const std::vector<std::string> lines = shown(usual.output).lines;
  size_t first = 0;
  while (first < lines.size() && !lines[first].starts_with("step 1/20  loss ")) ++first;
  REQUIRE(first < lines.size());
  CHECK(first <= 13);
  const std::string before = usual.output.substr(0, usual.output.find("step 1/20"));
  for (const char* text : {" parameters: 2 layers of width 32, 4 heads in 2 groups, NSA attention",
                           "20 steps of 192 tokens (2 x 48 x 2 micro-steps): 3,840 tokens, fp32", "synthetic",
                           " MiB planned", "FLOP a step", "/run; a checkpoint every 10 steps, the newest 3 stay",
                           "NSA_LR=0.002 -> train.lr", "cuda_graph has no effect", "start    ", " s: program "})
    CHECK(has(before, text));
  for (const char* text : {"kernel of ", "\"dim\":32", "\"heartbeat_every\":-1"}) {
    CHECK_FALSE(has(usual.output, text));
    CHECK(has(read_text(folder.file("run/ranks/rank_0.log")), text));
    CHECK(has(run_program(terminal_args(folder, more + "--verbose")).output, text));
  }
}

TEST_CASE("terminal: the name of a run's folder does not control the terminal", "[terminal]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("red\x1b[31m");
  const Outcome outcome = run_program("train " + kTiny + " --set runtime.device=cpu --set train.steps=1 --verbose " +
                                      "--set 'log.out_dir=" + out + "'");
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(has(outcome.output, "weights in " + folder.file("red\\x1b[31m/model.safetensors")));
  CHECK_FALSE(has(outcome.output, "\x1b"));
  CHECK_FALSE(has(read_text(out + "/ranks/rank_0.log"), "\x1b"));
}

TEST_CASE("terminal: no other output corrupts the progress line, which fits", "[terminal]") {
  if (!require_script()) return;
  const TemporaryFolder folder;
  // An anomaly is printed while a progress line is open.
  const std::string more = "--set train.lr=0 --set log.plateau_steps=2 --set train.save_every=10 --overwrite";
  for (const int columns : {80, 120, 40}) {
    const Outcome outcome = on_terminal(folder, columns, terminal_args(folder, more));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    const Shown screen = shown(outcome.output);
    int anomalies = 0, steps = 0;
    for (const std::string& line : screen.lines) {
      anomalies += line.starts_with("triad: anomaly loss_plateau");
      if (has(line, "triad: anomaly")) CHECK(line.starts_with("triad: anomaly"));
      if (has(line, "checkpoint ") && !line.starts_with("next: "))
        CHECK((line.starts_with("checkpoint ") || line.starts_with("folder ")));
    }
    for (const std::string& state : screen.states) {
      if (!state.starts_with("step ") || has(state, "validation")) continue;
      CHECK(state.size() < static_cast<size_t>(columns));
      ++steps;
    }
    CHECK(anomalies >= 1);
    CHECK(steps > 1);
  }
  CHECK(has(read_text(folder.file("run/ranks/rank_0.log")), "anomaly loss_plateau: "));
}

TEST_CASE("terminal: eval and generate show progress on a terminal only", "[terminal]") {
  if (!require_script()) return;
  const TemporaryFolder folder;
  REQUIRE(run_program("init " + kTiny + " --out " + folder.file("fresh")).exit_code == 0);
  write_text(folder.file("text"), std::string(500, 'x'));
  const std::string from = " --device cpu --checkpoint " + folder.file("fresh") + " ",
                    eval = "eval" + from + "--batch 1 --seq 10 --data " + folder.file("text"),
                    generate = "generate" + from + "--prompt a --tokens 5 --seed 1 ";
  const Outcome evaluated = on_terminal(folder, 80, eval);
  INFO(evaluated.output);
  CHECK(has(evaluated.output, "eval: 50 of 50 batches  "));
  CHECK(has(evaluated.output, " tokens/s"));
  CHECK(run_command(TRIAD_PROGRAM " " + eval + " 2>&1 >/dev/null").output.empty());
  const Outcome written = on_terminal(folder, 80, generate + "--prompt b");
  INFO(written.output);
  CHECK(has(written.output, "generate: 5 of 5 tokens a text"));
  CHECK(has(written.output, "10 tokens in "));
  CHECK(run_command(TRIAD_PROGRAM " " + generate + " 2>&1 >/dev/null").output.empty());
}

TEST_CASE("terminal: errors are red and warnings yellow, but not in files, and not with NO_COLOR", "[terminal]") {
  if (!require_script()) return;
  const TemporaryFolder folder;
  const std::string red = "\x1b[31m", yellow = "\x1b[33m";
  const auto with = [&](const std::string& environment, const std::string& more) {
    write_text(folder.file("command"), fmt::format("{} exec {} {}\n", environment, TRIAD_PROGRAM, more));
    return run_command("script -qec 'sh " + folder.file("command") + "' /dev/null </dev/null").output;
  };
  CHECK(has(with("TERM=xterm", "plan absent.json"), red + "triad: config absent.json"));
  CHECK(has(with("TERM=xterm", "plan --absent"), red));
  for (const char* environment : {"TERM=xterm NO_COLOR=1", "TERM=dumb", "TERM=xterm OMPI_COMM_WORLD_RANK=0"}) {
    INFO(environment);
    CHECK(!has(with(environment, "plan absent.json"), "\x1b["));
  }
  CHECK(!has(run_program("plan absent.json", "TERM=xterm").output, "\x1b["));
  const std::string few = terminal_args(folder, "--set train.steps=1 --set runtime.precision=bf16");
  CHECK(has(with("TERM=xterm", few), yellow + "triad: "));
}

TEST_CASE("terminal: a long first step shows that it goes on", "[terminal][slow]") {
  if (!require_script()) return;
  const TemporaryFolder folder;
  // The first product sleeps longer than the time after which a terminal shows where a step is.
  write_text(folder.file("command"),
             fmt::format("{}exec {} {}\n", with_faults("TRIAD_FAULTS='0 0.2' TRIAD_FAULTS_MOST_S=4"), TRIAD_PROGRAM,
                         terminal_args(folder, "--set train.steps=2")));
  const Outcome outcome = run_command("script -qec 'sh " + folder.file("command") + "' /dev/null </dev/null");
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(has(outcome.output, "step 1/2  "));
  CHECK(has(outcome.output, " so far, in "));
}

TEST_CASE("terminal: a finished run names the next commands, which run", "[terminal]") {
  const TemporaryFolder folder;
  const Outcome outcome = run_program(terminal_args(folder, "--set train.steps=2"));
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const size_t begin = outcome.output.find("next: ");
  REQUIRE(begin != std::string::npos);
  std::string next = outcome.output.substr(begin + 6);
  next = next.substr(0, next.find('\n'));
  for (const auto& [word, value] : {std::pair{"TEXT", "abc"}, {"FOLDER", "exported"}})
    next.replace(next.find(word), std::string(word).size(), value);
  next.erase(next.find("for more steps: "), std::string("for more steps: ").size());
  const Outcome all = run_command("cd " + folder.path() + " && set -e; " + next);
  INFO(next << "\n" << all.output);
  CHECK(all.exit_code == 0);
  CHECK(std::filesystem::exists(folder.file("run/report.html")));
  CHECK(std::filesystem::exists(folder.file("exported/config.json")));
  CHECK(has(all.output, "done: 4 steps"));
}
