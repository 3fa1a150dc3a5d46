// train.keep_best and train.patience: which checkpoints stay, when a run ends, and that a resume knows both.
#include <cctype>
#include <cmath>
#include <filesystem>
#include <set>

#include "io/checkpoint.h"
#include "io/json_config.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/checkpoint/state.h"
#include "train/config/load_config.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// At this learning rate the validation loss falls in the first evaluations, and then rises.
const std::string kRises = "--set train.lr=0.3 --set train.min_lr_fraction=1 --set train.grad_clip=0 ";
const std::string kSaves = kRises + "--set train.steps=16 --set train.eval_every=2 --set train.save_every=4 ";

std::set<int64_t> steps_in(const std::string& out) {
  std::set<int64_t> steps;
  for (const CheckpointFolder& checkpoint : list_checkpoints(out + "/checkpoints")) steps.insert(checkpoint.step);
  return steps;
}

Json state_at(const std::string& out, int64_t step) {
  return read_json_file(fmt::format("{}/checkpoints/step_{}/state.json", out, step));
}

// {step, loss} of each evaluation, and of the lowest one.
struct Losses {
  std::vector<std::pair<int64_t, double>> all;
  std::pair<int64_t, double> best = {-1, INFINITY};
};
Losses losses_of(const std::string& out) {
  Losses losses;
  for (const std::string& line : lines(out + "/val.csv")) {
    if (!std::isdigit(static_cast<unsigned char>(line[0]))) continue;
    const size_t comma = line.find(',');
    losses.all.emplace_back(std::stoll(line), std::stod(line.substr(comma + 1)));
    if (losses.all.back().second < losses.best.second) losses.best = losses.all.back();
  }
  return losses;
}

Outcome train_best(const std::string& out, const std::string& more) {
  const Outcome outcome = run_program(train_on(out, "cpu", more));
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return outcome;
}

}  // namespace

TEST_CASE("keep best: the lowest loss counts, within a stage, and what is not finite does not", "[train]") {
  TrainConfig t;
  t.steps = 100, t.patience = 2;
  Validation v;
  CHECK(!v.any());
  v.add(t, 10, NAN);
  CHECK((v.best_step == -1 && v.since == 1));
  v.add(t, 20, 3.0);
  CHECK((v.best_step == 20 && v.best_loss == 3.0 && v.since == 0));
  v.add(t, 30, 3.0);  // an equal loss is no improvement
  CHECK((v.best_step == 20 && v.since == 1 && !v.out_of_patience(t)));
  v.add(t, 40, NAN);
  CHECK(v.out_of_patience(t));
  v.add(t, 50, 2.5);
  CHECK((v.best_step == 50 && v.since == 0));
  t.patience = 0;
  CHECK(!Validation{.best_step = 1, .best_loss = 1, .since = 1000}.out_of_patience(t));
  // In another stage rows have another length, so the losses are not compared.
  t.stages = {{.steps = 50}, {.steps = 50}};
  v.add(t, 60, 9.0);
  CHECK((v.best_step == 60 && v.best_loss == 9.0));
}

TEST_CASE("keep best: the checkpoint with the lowest validation loss stays beside the newest", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const Outcome outcome = train_best(out, kSaves + "--set train.keep_last=1 --set train.keep_best=true");
  const Losses losses = losses_of(out);
  INFO(outcome.output);
  REQUIRE(losses.all.size() == 8);
  REQUIRE(losses.best.first < 16);
  CHECK(steps_in(out) == std::set<int64_t>{losses.best.first, 16});
  const Json newest = state_at(out, 16)["validation"], metrics = read_json_file(out + "/metrics.json");
  CHECK(newest["best_step"] == losses.best.first);
  CHECK(newest["since"] == 8 - losses.best.first / 2);
  CHECK(metrics["best_step"] == losses.best.first);
  CHECK(metrics["best_val_loss"].get<double>() == Approx(losses.best.second).epsilon(1e-4));
  CHECK(has(outcome.output,
            fmt::format("the lowest validation loss was {:.4f} in step {}: ", losses.best.second, losses.best.first)));
  // Without keep_best it goes, and only evaluations that are not saved differ.
  train_best(folder.file("other"), kSaves + "--set train.keep_last=1");
  CHECK(steps_in(folder.file("other")) == std::set<int64_t>{16});
  CHECK(read_text(folder.file("other") + "/model.safetensors") == read_text(out + "/model.safetensors"));
}

TEST_CASE("keep best: a resumed run keeps and ends as one that was not interrupted", "[train]") {
  const TemporaryFolder folder;
  const std::string keys = kSaves + "--set train.keep_last=2 --set train.keep_best=true --set train.patience=3 ";
  const std::string whole = folder.file("whole"), cut = folder.file("cut");
  const Outcome outcome = train_best(whole, keys);
  const int64_t best = losses_of(whole).best.first, end = best + 3 * 2;
  INFO(outcome.output);
  REQUIRE(end < 16);
  CHECK(has(outcome.output, fmt::format("the run ends after step {} of 16: train.patience is 3", end)));
  CHECK(read_json_file(whole + "/metrics.json")["step"] == end);
  CHECK(steps_in(whole).contains(best));
  CHECK(steps_in(whole).contains(end));
  // The same in two processes, the first of which ends after an evaluation: a run evaluates at its end too.
  for (int64_t step = 2; step < end; step += 2) {
    fs::remove_all(cut);
    const std::string stops = fmt::format("--set train.steps={} ", step);
    // A constant learning rate does not depend on train.steps.
    train_best(cut, keys + stops);
    train_best(cut, keys + "--resume latest");
    INFO("cut at step " << step);
    CHECK(read_text(cut + "/model.safetensors") == read_text(whole + "/model.safetensors"));
    CHECK(state_at(cut, end)["validation"] == state_at(whole, end)["validation"]);
    CHECK(steps_in(cut).contains(best));
  }
  // It is complete, until its patience is longer.
  CHECK(has(train_best(cut, keys + "--resume latest").output, "where train.patience 3 ended it"));
  CHECK(has(train_best(cut, keys + "--resume " + cut + "/checkpoints/latest").output,
            fmt::format("done: {} steps", end)));
  CHECK(has(train_best(cut, keys + "--set train.patience=0 --resume latest").output, "done: 16 steps"));
  CHECK(losses_of(cut).all.size() == 8);
}

TEST_CASE("keep best: all ranks save and end alike", "[train][dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string keys = kSaves + "--set train.keep_last=1 --set train.keep_best=true --set train.patience=1 ";
  for (const char* zero : {"0", "1"}) {
    const std::string out = folder.file(std::string("zero") + zero);
    const Outcome outcome = run_ranks(2, train_on(out, "cpu", keys + "--set dist.zero=" + zero));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    const int64_t best = losses_of(out).best.first;
    REQUIRE(best + 2 < 16);
    CHECK(read_json_file(out + "/metrics.json")["step"] == best + 2);
    CHECK(steps_in(out) == std::set<int64_t>{best, best + 2});
  }
}

TEST_CASE("keep best: a run that is killed in a save loses no best checkpoint", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), parent = out + "/checkpoints";
  train_best(out, kSaves + "--set train.keep_last=1 --set train.keep_best=true --set train.steps=8");
  const int64_t best = losses_of(out).best.first;
  // As after a kill between the new best checkpoint's rename and the old one's removal: both are there.
  fs::copy(fmt::format("{}/step_{}", parent, best), parent + "/step_1", fs::copy_options::recursive);
  CHECK(steps_in(out).contains(best));
  train_best(out, kSaves + "--set train.keep_last=1 --set train.keep_best=true --resume latest");
  CHECK(steps_in(out) == std::set<int64_t>{losses_of(out).best.first, 16});
}
