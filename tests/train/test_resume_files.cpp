// A resume continues the previous run's files: in each file that grows step by step, every step occurs once.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <numeric>
#include <regex>
#include <set>
#include <thread>

#include "engine/process/text.h"
#include "io/json_config.h"
#include "tests/support/checked_run.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"
#include "train/monitor/bucket_trace.h"
#include "train/monitor/step_text.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// Returns the step numbers that begin the lines after `header`, without immediate repetitions.
std::vector<int> steps_of(const std::vector<std::string>& lines, const std::string& header) {
  std::vector<int> steps;
  for (auto it = std::find(lines.begin(), lines.end(), header); it != lines.end(); ++it)
    if (const auto step = number_between(*it, "", ","); step && (steps.empty() || steps.back() != *step))
      steps.push_back(static_cast<int>(*step));
  return steps;
}

std::vector<int> traced(const std::string& run) {
  std::vector<int> steps;
  for (const std::string& line : lines(run + "/traces.log"))
    if (const auto step = number_between(line, "step ", ":")) steps.push_back(static_cast<int>(*step));
  return steps;
}

std::vector<int> one_to(int last) {
  std::vector<int> steps(static_cast<size_t>(last));
  std::iota(steps.begin(), steps.end(), 1);
  return steps;
}

}  // namespace

TEST_CASE("resume: a text is cut after a step, and an unfinished line is dropped", "[train]") {
  const auto step_of = [](std::string_view line) { return number_between(line, "step ", ":"); };
  const std::string text = "head\nstep 1: a\n more\nstep 2: b\n step 9: no\nstep 3: c\n mo";
  CHECK(text_until(text, 3, step_of) == "head\nstep 1: a\n more\nstep 2: b\n step 9: no\nstep 3: c\n");
  CHECK(text_until(text, 2, step_of) == "head\nstep 1: a\n more\nstep 2: b\n step 9: no\n");
  CHECK(text_until(text, 0, step_of) == "head\n");
  CHECK(text_until("", 5, step_of).empty());
  CHECK(number_between("12,3", "", ",") == 12);
  CHECK_FALSE(number_between("12", "", ","));
  CHECK_FALSE(number_between("x,3", "", ","));
  // Rows under another bucket table are dropped, because the new table does not describe them.
  CHECK(BucketTrace::rows_until(1, "A\n", "A\n1,a\n2,a\n") == "1,a\n");
  CHECK(BucketTrace::rows_until(1, "B\n", "A\n1,a\n2,a\n").empty());
}

TEST_CASE("resume: every file that grows step by step has each step once", "[train][dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const std::string more =
      "--set train.save_every=5 --set train.eval_every=2 --set log.memory_every=3 --set log.every=1 "
      "--set 'runtime.kernels={\"sel\":\"fused\"}' "
      "--set 'log.diagnostics=[\"ledger\",\"layer_norms\",\"backward\",\"buckets\"]' ";
  run(out, 2, more + "--set train.steps=12 ");
  for (const char* rank : {"", "_rank1"}) CHECK(fs::exists(out + "/mem_step12" + rank + ".pickle"));
  // Adds files as if step 12's model had been evaluated.
  for (const char* name : {"needle.csv", "needle.svg", "needle_copy.csv", "positions.csv"})
    write_text(out + "/" + name, "");
  run(out, 2, more + "--set train.steps=8 --overwrite --resume " + out + "/checkpoints/step_5");
  for (const char* name : {"needle.csv", "needle.svg", "needle_copy.csv", "positions.csv"})
    CHECK_FALSE(fs::exists(out + "/" + name));

  std::set<std::string> tables;
  for (const fs::directory_entry& entry : fs::directory_iterator(out)) {
    const std::string name = entry.path().filename().string();
    INFO(name);
    if (name.ends_with(".csv")) {
      const std::vector<std::string> all = lines(entry.path().string());
      CHECK(steps_of(all, all.at(0)) == (name == "val.csv" ? std::vector<int>{2, 4, 6, 8} : one_to(8)));
      CHECK(std::set<std::string>(all.begin(), all.end()).size() == all.size());
      tables.insert(name);
    }
    static const std::regex kSnapshot("mem_step(\\d+)(_rank1)?\\..*");
    std::smatch match;
    if (std::regex_match(name, match, kSnapshot)) CHECK(std::stoi(match[1].str()) <= 8);
  }
  for (const char* name : {"training.csv", "val.csv", "grad_ledger.csv", "fallback_counters.csv"})
    CHECK(tables.count(name) == 1);
  const std::string header(BucketTrace::kHeader, std::string_view(BucketTrace::kHeader).size() - 1);
  for (const char* rank : {"", "_rank1"})
    CHECK(steps_of(lines(out + "/ddp_buckets" + rank + ".txt"), header) == one_to(8));
  CHECK(traced(out) == one_to(8));

  // A resume without the trace keeps the trace's rows up to its step.
  run(out, 2, "--set train.save_every=5 --set train.steps=8 --overwrite --resume " + out + "/checkpoints/step_5");
  for (const char* rank : {"", "_rank1"})
    CHECK(steps_of(lines(out + "/ddp_buckets" + rank + ".txt"), header) == one_to(5));
  CHECK(traced(out) == one_to(5));
}

TEST_CASE("resume: tables that the resumed run does not write are cut, too", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const std::string fp8 = "--set runtime.matmul_dtype=fp8 ";
  run(out, 1,
      fp8 +
          "--set train.steps=8 --set train.save_every=5 --set train.eval_every=1 --set "
          "'runtime.kernels={\"sel\":\"fused\"}' "
          "--set 'log.diagnostics=[\"ledger\"]'");
  const std::vector<std::string> names = {
      "training.csv", "val.csv", "fallback_counters.csv", "grad_ledger.csv", "gates.csv", "k_stats.csv", "fp8.csv"};
  const auto check = [&](int last) {
    for (const std::string& name : names) {
      INFO(name);
      const std::vector<std::string> all = lines(out + "/" + name);
      CHECK(steps_of(all, all.at(0)) == one_to(last));
    }
  };
  check(8);
  run(out, 1,
      fp8 + "--set log.csv=false --set log.stats=false --set train.steps=6 --overwrite --resume " + out +
          "/checkpoints/step_5");
  check(5);
}

TEST_CASE("resume: damaged lines and file names with impossible numbers do not end it", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  run(out, 1, "--set train.steps=4 --set train.save_every=2 --set train.eval_every=2 --set log.every=1");
  const std::vector<std::string> tables = {"training.csv", "val.csv", "gates.csv", "k_stats.csv"};
  for (const std::string& name : tables) {
    const std::string path = out + "/" + name, text = read_text(path);
    const size_t at = text.find('\n') + 1;
    write_text(path, text.substr(0, at) + "\x1b[2J" + text.substr(at + 1));  // damages the first row
  }
  write_text(out + "/heartbeat_rank0.jsonl", "{\n" + read_text(out + "/heartbeat_rank0.jsonl"));
  const std::string impossible = "99999999999999999999";
  for (const char* name : {"/mem_step", "/heartbeat_rank", "/checkpoints/step_", "/checkpoints/set_aside_"}) {
    fs::create_directory(out + name + impossible);
    write_text(out + name + impossible + "/state.json", "{}");
  }
  write_text(out + "/mem_step" + impossible + ".json", "{}");
  const Outcome outcome = run_program(
      train_args(out,
                 "--set train.accumulate_grad_batches=4 --set train.steps=6 --set train.eval_every=2 --set log.every=1 "
                 "--resume latest"));
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  for (const std::string& name : tables)
    CHECK(has(outcome.output, out + "/" + name + " line 2 is damaged: \"\\x1b[2J"));
  CHECK(column(out + "/training.csv", "loss").size() == 5);  // the damaged row of step 1 is gone
  CHECK(column(out + "/val.csv", "ppl").size() == 2);
  CHECK(fs::exists(out + "/mem_step" + impossible + ".json"));
  const Outcome page = run_program("report " + out);
  INFO(page.output);
  CHECK(page.exit_code == 0);
}

TEST_CASE("resume: a run whose config says runtime.deterministic false, as was allowed once, goes on", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), state = out + "/checkpoints/step_2/state.json";
  REQUIRE(run_program(train_args(out, "--set train.steps=2")).exit_code == 0);
  for (const std::string& file : {out + "/config.json", state}) {
    Json root = parse_json(read_text(file), file);
    (file == state ? root["config"] : root)["runtime"]["deterministic"] = false;
    write_text(file, root.dump());
  }
  const Outcome resumed = run_program("train --set train.steps=4 --resume " + out);
  INFO(resumed.output);
  CHECK(resumed.exit_code == 0);
  CHECK(parse_json(read_text(out + "/config.json"), "config")["runtime"]["deterministic"] == true);
}

TEST_CASE("resume: auto begins a run, goes on with it, and leaves a complete one alone", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"),
                    args = train_args(out, "--resume auto --set train.save_every=4 --set train.schedule=wsd ");
  refused(args + "--overwrite", 2, {"--resume auto begins where no run is: it takes no --overwrite"});
  refused("train --resume auto", 2, {"--resume auto needs a config, for its log.out_dir"}, "env -u CONFIG");
  fs::create_directory(out);
  write_text(out + "/notes.txt", "mine");
  CHECK(!has(run_ok(args + "--set train.steps=6 --set train.save_last=false"), "resume"));
  fs::remove(out + "/model.safetensors");
  const std::string further = run_ok(args + "--set train.steps=10 --accept-changed-data", "CONFIG=" + kTiny);
  CHECK(has(further, "step 5/10 "));
  CHECK(!has(further, "step 4/10 "));
  CHECK(has(run_ok(args + "--set train.steps=10"), "nothing is left to train: " + out));
  CHECK(lines(out + "/training.csv").size() == 11);
  const std::string whole = folder.file("whole");
  run_ok(train_args(whole, "--set train.steps=10 --set train.schedule=wsd"));
  CHECK(difference(whole + kWeights, out + kWeights).all == 0);
  CHECK(read_text(out + "/notes.txt") == "mine");
}

TEST_CASE("resume: a stopped run prints the command that resumes it, which needs no config", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("it's \"my\" run"), log = folder.file("log");
  const std::string endless = "--set train.steps=1000000 --set train.allow_unsafe=true --set train.lr=0.002 ";
  for (const std::string& environment : {std::string(), "export CONFIG=" + kTiny + " NSA_LR=0.004; "}) {
    for (const std::string& earlier : {out + "/mem_step1.json", log}) fs::remove(earlier);
    BackgroundProgram program(train_args(shell_word(out), endless + "--overwrite"), environment, log);
    for (int i = 0; i < 60000 && !fs::exists(out + "/mem_step1.json"); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    program.send(SIGTERM);
    CHECK(program.wait() == 0);
    const std::string text = read_text(log), mark = "with a checkpoint. To go on: ";
    INFO(text);
    const size_t at = text.find(mark);
    REQUIRE(at != std::string::npos);
    const std::string command = text.substr(at + mark.size(), text.find('\n', at) - at - mark.size());
    const Json state = parse_json(read_text(out + "/checkpoints/latest/state.json"), "state.json");
    const int64_t steps = state["step"].get<int64_t>() + 2;
    const Outcome further = run_command(environment + command + " --set train.steps=" + std::to_string(steps));
    INFO(command << "\n" << further.output);
    CHECK(further.exit_code == 0);
    CHECK(parse_json(read_text(out + "/metrics.json"), "metrics")["step"] == steps);
    Json config = parse_json(read_text(out + "/config.json"), "config"), before = state["config"];
    CHECK(config["train"]["lr"] == 0.002);
    config["train"].erase("steps"), before["train"].erase("steps");
    CHECK(config == before);
  }
  // A resume accepts the run's folder after it was moved, under any path.
  const std::string moved = folder.file("moved");
  fs::rename(out, moved);
  int64_t steps = parse_json(read_text(moved + "/metrics.json"), "metrics")["step"].get<int64_t>();
  const Outcome nothing = run_program("train --set train.steps=1 --resume " + moved, "env -u CONFIG");
  CHECK(has(nothing.output, "nothing is left to train: " + moved));
  for (const std::string& name :
       {moved, moved + "/", moved + "/latest", moved + "/checkpoints", moved + "/checkpoints/latest",
        fs::canonical(moved + "/checkpoints/latest").string()}) {
    const Outcome outcome = run_program(
        "train --set train.steps=" + std::to_string(++steps) + " --set train.keep_last=0 --overwrite --resume " + name,
        "env -u CONFIG");
    INFO(name << "\n" << outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(fs::exists(moved + "/checkpoints/step_" + std::to_string(steps)));
  }
  CHECK_FALSE(fs::exists(out));
  // A resume from the printed command may not change the model either.
  const Outcome other =
      run_program("train --set train.steps=999 --set model.dim=64 --resume " + moved, "env -u CONFIG");
  CHECK(other.exit_code == 1);
  CHECK(has(other.output, "model.dim"));
}
