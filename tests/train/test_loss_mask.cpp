// Training with a loss mask: ranks, micro-steps and resumes agree, a step without any target changes nothing, and
// `triad eval` counts what is learned.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "io/file.h"
#include "io/json_config.h"
#include "tests/support/dist_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/inference.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// JSONL with questions; every `period`-th has an answer.
std::string questions(const TemporaryFolder& folder, int period, int n = 300) {
  std::string text;
  for (int i = 0; i < n; ++i) {
    const std::string words(static_cast<size_t>(3 + i * i % 40), static_cast<char>('a' + i % 26));
    Json messages = {{{"role", "user"}, {"content", words}}};
    if (i % period == 0) messages.push_back({{"role", "assistant"}, {"content", "yes, " + words}});
    text += Json{{"messages", messages}}.dump() + "\n";
  }
  const std::string path = folder.file(fmt::format("questions_{}.jsonl", period));
  write_text(path, text);
  return path;
}

std::string on(const std::string& file) { return "--set data.kind=text --set data.paths=" + file + " "; }

Json metrics_of(const std::string& run) { return parse_json(read_file(run + "/metrics.json"), "metrics"); }

}  // namespace

TEST_CASE("mask: runs on 1 and 2 ranks, in 1 and 4 micro-steps, have the same losses and weights", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string file = questions(folder, 2);
  for (const char* packing : {"stream", "best_fit"}) {
    const std::string more =
        on(file) + "--set train.eval_every=10 --set train.eval_batches=3 --set data.packing=" + packing + " ";
    const std::string one = run(folder.file(std::string("1") + packing), 1, more);
    const std::string two = run(folder.file(std::string("2") + packing), 2, more);
    CHECK(difference(one + kWeights, two + kWeights).all < 1e-5);
    const auto losses = column(one + "/training.csv", "loss");
    for (const auto& [step, loss] : column(two + "/training.csv", "loss")) CHECK(loss == Approx(losses.at(step)));
    CHECK(column(one + "/val.csv", "val_loss").at(20) == Approx(column(two + "/val.csv", "val_loss").at(20)));
    const Outcome wide =
        run_program(train_args(folder.file(std::string("wide") + packing), more + "--set train.micro_batch_size=8"));
    REQUIRE(wide.exit_code == 0);
    CHECK(difference(one + kWeights, folder.file(std::string("wide") + packing) + kWeights).all < 1e-5);
    CHECK(has(read_text(one + "/ranks/rank_0.log"), "of them learned"));
    CHECK(metrics_of(one)["steps_without_targets"] == 0);
  }
}

TEST_CASE("mask: the validation loss is the mean over all positions, however they are divided into batches",
          "[train]") {
  const TemporaryFolder folder;
  const std::string more = on(questions(folder, 3)) + "--set train.steps=4 --set train.eval_every=4 ";
  // The same eight rows, each with a different learned-token count.
  const std::pair<int, int> divisions[] = {{1, 8}, {2, 4}, {4, 2}};
  std::vector<double> losses;
  for (const auto& [rows, batches] : divisions) {
    const std::string out = folder.file(fmt::format("of_{}", rows));
    const Outcome trained = run_program(
        train_args(out, more + fmt::format("--set train.micro_batch_size={} --set train.accumulate_grad_batches={} "
                                           "--set train.eval_batches={}",
                                           rows, 4 / rows, batches)));
    INFO(trained.output);
    REQUIRE(trained.exit_code == 0);
    losses.push_back(column(out + "/val.csv", "val_loss").at(4));
    CHECK(losses.back() == Approx(losses.front()).epsilon(1e-5));
  }
}

TEST_CASE("mask: a resume ends in the same bits, of text and of shards", "[train]") {
  const TemporaryFolder folder;
  const std::string file = questions(folder, 2), shards = folder.file("shards");
  REQUIRE(run_program("data --input " + file + " --val-fraction 0.1 --out " + shards).exit_code == 0);
  for (const std::string& data :
       {on(file) + "--set data.packing=best_fit ", "--set data.kind=shards --set data.paths=" + shards + " "}) {
    const std::string name = std::to_string(data.size());
    const std::string more = data + "--set train.save_every=7 ";
    const std::string whole = run(folder.file("whole" + name), 1, more);
    const std::string again = run(folder.file("again" + name), 1, more + "--resume " + whole + "/checkpoints/step_7");
    CHECK(same_file(whole + kWeights, again + kWeights));
    CHECK(parse_json(read_file(whole + "/config.json"), "config")["data"]["documents"] == "attend_within");
  }
}

TEST_CASE("mask: a step without any target changes neither weights nor moments", "[train]") {
  const Config config = load_config(kTiny, {}).config;
  const auto runtime = allocate_planned(config, Device::cpu(), nullptr);
  TrainStep step(*runtime, config, nullptr);
  Params& params = step.model().params();
  params.init(runtime->ctx(), 7);
  const auto n = static_cast<size_t>(config.train.micro_batch_size * config.train.seq_len);
  std::vector<int32_t> tokens(n), targets(n, -1);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>(i * i % 256);
  const auto take = [&](int64_t number, int64_t positions) {
    step.begin();
    for (int64_t i = 0; i < config.train.accumulate_grad_batches; ++i) step.micro_step(tokens, targets, positions);
    return step.finish(number, positions);
  };
  const auto state = [&] {
    std::vector<double> all;
    for (const Optimizer::State which : Optimizer::kStates)
      step.optimizer().gather(runtime->ctx(), which, [&](const ElementRange&, const Tensor& state_part) {
        const std::vector<double> values = read_floats(runtime->ctx(), state_part);
        all.insert(all.end(), values.begin(), values.end());
      });
    return all;
  };
  const std::vector<double> fresh = state();
  targets[5] = 3;
  const TrainStep::Result first = take(0, config.train.accumulate_grad_batches);
  CHECK(first.targets == config.train.accumulate_grad_batches);
  CHECK(first.loss > 1);
  const std::vector<double> before = state();
  CHECK(before != fresh);  // the moments are not zero: AdamW would move the weights
  targets[5] = -1;
  const TrainStep::Result empty = take(1, 0);
  CHECK(empty.targets == 0);
  CHECK(empty.loss == 0);
  CHECK(empty.grad_norm == 0);
  CHECK(empty.finite);
  CHECK(state() == before);
  targets[5] = 3;
  CHECK(take(2, config.train.accumulate_grad_batches).finite);  // no later step is held back
  CHECK(state() != before);
}

TEST_CASE("mask: steps without a target are skipped and counted, on any number of ranks", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string file = questions(folder, 30);
  const std::string more = on(file) + "--set train.eval_every=0 --set log.every=1 ";
  const std::string one = run(folder.file("one"), 1, more + "--set train.micro_batch_size=1 ");
  for (const char* zero : {"0", "1"}) {
    const std::string two = run(folder.file(std::string("two") + zero), 2,
                                more + "--set train.micro_batch_size=1 --set dist.zero=" + zero + " ");
    CHECK(difference(one + kWeights, two + kWeights).all < 1e-5);
    CHECK(heartbeats(two, 1, "no_targets").size() == heartbeats(one, 0, "no_targets").size());
  }
  const std::vector<Json> skipped = heartbeats(one, 0, "no_targets");
  const auto losses = column(one + "/training.csv", "loss");
  CHECK(skipped.size() > 2);
  CHECK(skipped.size() < losses.size());
  CHECK(metrics_of(one)["steps_without_targets"] == skipped.size());
  CHECK(skipped.back()["steps"] == skipped.size());
  CHECK(has(read_text(one + "/ranks/rank_0.log"), "no target: the loss mask leaves none"));
  for (const auto& [step, loss] : losses) {
    const bool empty =
        std::any_of(skipped.begin(), skipped.end(), [&](const Json& beat) { return beat["step"] == step; });
    INFO("step " << step);
    CHECK((loss == 0) == empty);
  }
  // Nothing to learn at all, or nothing to evaluate, is an error at the start.
  const std::string none = folder.file("none.jsonl");
  std::string text;
  for (int i = 0; i < 50; ++i) text += R"({"messages":[{"role":"user","content":"why?"}]})" + std::string("\n");
  write_text(none, text);
  const Outcome nothing = run_program(train_args(folder.file("nothing"), on(none)));
  CHECK(nothing.exit_code == 1);
  CHECK(has(nothing.output, "leaves no token that is learned"));
  const Outcome no_eval = run_program(
      train_args(folder.file("no_eval"), on(file) + "--set train.eval_every=5 --set data.val_paths=" + none + " "));
  INFO(no_eval.output);
  CHECK(no_eval.exit_code == 1);
  CHECK(has(no_eval.output, "which an evaluation reads"));
}

TEST_CASE("mask: eval counts what is learned, in text and in shards", "[train]") {
  const TemporaryFolder folder;
  const std::string run_folder = run(folder.file("run"), 1, on(questions(folder, 2)) + "--set train.steps=3 ");
  const auto eval = [&](const std::string& data) {
    const Outcome outcome =
        run_program("eval --device cpu --json --batch 3 --seq 100 --checkpoint " + run_folder + " --data " + data);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return parse_json(outcome.standard_output.substr(outcome.standard_output.find('{')), "eval");
  };
  // The loss on prompt and completion equals the loss on all text, less the prompt's where nothing follows it.
  std::string pairs, texts, prompts;
  for (int i = 0; i < 3; ++i) {
    const std::string prompt = fmt::format("question {} ", i), completion = fmt::format("answer {}", 7 * i);
    pairs += Json{{"prompt", prompt}, {"completion", completion}}.dump() + "\n";
    texts += Json{{"text", prompt + completion}}.dump() + "\n";
    prompts += Json{{"text", prompt}}.dump() + "\n";
  }
  write_text(folder.file("pairs.jsonl"), pairs);
  write_text(folder.file("texts.jsonl"), texts);
  write_text(folder.file("prompts.jsonl"), prompts);
  const Json learned = eval(folder.file("pairs.jsonl")), all = eval(folder.file("texts.jsonl"));
  // Three completions (8, 8 and 9 bytes), and the separators after the first two.
  CHECK(learned["positions"] == 8 + 8 + 9 + 2);
  CHECK(all["positions"] == 3 * 11 + 8 + 8 + 9 + 2);
  const auto sum = [](const Json& result) { return result["loss"].get<double>() * result["positions"].get<double>(); };
  const auto bits = [&](const Json& result, int bytes) { return sum(result) / std::log(2) / bytes; };
  CHECK(learned["bits_per_byte"].get<double>() == Approx(bits(learned, 25)));
  // Each document on its own: no separator is a target.
  double prompt_sum = 0;
  for (int i = 0; i < 3; ++i) {
    const auto line = [&](const std::string& lines) {
      size_t begin = 0;
      for (int skip = 0; skip < i; ++skip) begin = lines.find('\n', begin) + 1;
      write_text(folder.file("line.jsonl"), lines.substr(begin, lines.find('\n', begin) - begin + 1));
      return sum(eval(folder.file("line.jsonl")));
    };
    prompt_sum += line(prompts);
    const double pair_loss = line(pairs);
    CHECK(pair_loss == Approx(line(texts) - line(prompts)).epsilon(1e-4));
  }
  CHECK(sum(learned) < sum(all));
  CHECK(sum(all) - sum(learned) == Approx(prompt_sum).epsilon(1e-4));
  REQUIRE(run_program("data --input " + folder.file("pairs.jsonl") + " --val-fraction 0 --out " + folder.file("shards"))
              .exit_code == 0);
  const Json shards = eval(folder.file("shards/train_000000.bin"));
  CHECK(shards["positions"] == learned["positions"]);
  CHECK(shards["loss"].get<double>() == Approx(learned["loss"].get<double>()).epsilon(1e-6));
  CHECK(shards["by_document"] == learned["by_document"]);
  write_text(folder.file("none.jsonl"), R"({"messages":[{"role":"user","content":"why?"}]})");
  const Outcome none =
      run_program("eval --device cpu --checkpoint " + run_folder + " --data " + folder.file("none.jsonl"));
  CHECK(none.exit_code == 1);
  CHECK(has(none.output, "leaves no token that is learned"));
}
