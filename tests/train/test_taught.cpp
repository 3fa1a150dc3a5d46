// A taught index (nsa.selector index) in training: runs end with one rank's weights however ranks and micro-steps
// divide a step, resume to the bit, and clip the index by a norm of its own. Whole runs.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "io/weight_index.h"
#include "tests/support/dist_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

const std::string kTaughtIndex = "--set nsa.selector=index --set nsa.d_index=4 ",
                  kOneSoftmax =
                      kTaughtIndex + "--set nsa.branches=sel --set nsa.init_blocks=0 --set nsa.local_blocks=1 ";

// 12 steps of 12 sequences of 50 tokens. Returns the run's folder.
std::string train_taught(const std::string& out, const std::string& keys, const Arrangement& on = {1, ""},
                         int groups = 1, int accumulated = 1) {
  const std::string args = fmt::format(
      "{} --set train.steps=12 --set train.seq_len=50 --set train.eps=1e-4 --set runtime.asserts=true --set "
      "log.heartbeat_every=1 --set train.micro_batch_size={} --set train.accumulate_grad_batches={} {} {}",
      train_args(out), 12 / groups / accumulated, accumulated, keys, on.keys);
  const Outcome outcome = on.ranks == 1 ? run_program(args) : run_ranks(on.ranks, args);
  INFO(on.ranks << " ranks: triad " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return out;
}

// |a - b| / |a| over the final weights of the index, or over all others.
double taught_distance(const std::string& a, const std::string& b, bool index) {
  const auto x = tensors(tensors_path(a)), y = tensors(tensors_path(b));
  double error = 0, size = 0;
  for (const auto& [name, values] : x) {
    if ((name.find(".attn.index_") != std::string::npos) != index) continue;
    for (size_t i = 0; i < values.size(); ++i) {
      error += std::pow(double{values[i]} - y.at(name).at(i), 2);
      size += std::pow(double{values[i]}, 2);
    }
  }
  REQUIRE(size > 0);
  return std::sqrt(error / size);
}

void check_near(const std::string& one, const std::string& other) {
  INFO(other);
  CHECK(taught_distance(one, other, /*index=*/false) < 1e-6);
  CHECK(taught_distance(one, other, /*index=*/true) < 1e-6);
  for (const char* number : {"index_loss", "index_grad_norm"}) {
    const double a = heartbeats(one, 0, "step_end").back()[number].get<double>(),
                 b = heartbeats(other, 0, "step_end").back()[number].get<double>();
    CHECK(a > 0);
    CHECK(a == Approx(b).epsilon(1e-4));
  }
}

}  // namespace

TEST_CASE("taught: 12 steps have the weights of one rank, however ranks and micro-steps divide them", "[dist]") {
  if (!require_mpirun()) return;
  struct Division {
    const char* name;
    Arrangement on;
    int groups, accumulated;
  };
  const Division divisions[] = {
      {"accumulated", {1, ""}, 1, 3},
      {"zero0", {2, ""}, 2, 1},
      {"zero1", {2, "--set dist.zero=1"}, 2, 3},
      {"zero2", {2, "--set dist.zero=2"}, 2, 1},
      {"zero3", {2, "--set dist.zero=3 --set runtime.recompute=block"}, 2, 1},
      {"context", {2, "--set dist.context=2 --set runtime.recompute=attention"}, 1, 1},
      {"replicas", {4, "--set dist.replicas=2 --set dist.zero=2"}, 4, 3},
  };
  const TemporaryFolder folder;
  for (const auto& [attention, keys] : {std::pair{"three-", kTaughtIndex}, {"sel-", kOneSoftmax}}) {
    const std::string one = train_taught(folder.file(std::string(attention) + "one"), keys);
    for (const Division& d : divisions)
      check_near(one, train_taught(folder.file(std::string(attention) + d.name), keys, d.on, d.groups, d.accumulated));
  }
}

TEST_CASE("taught: padded rows and dense steps weigh the same on every division", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 700; ++i)
    text += fmt::format("{{\"text\": \"line {} of a text{}\"}}\n", i, std::string(i % 29, 'x'));
  write_text(folder.file("text.jsonl"), text);
  const std::string data = kOneSoftmax +
                           "--set data.kind=text --set model.vocab_size=257 --set data.packing=best_fit "
                           "--set data.max_documents=1 --set data.paths=" +
                           folder.file("text.jsonl") + " ";
  const std::string one = train_taught(folder.file("one"), data);
  check_near(one, train_taught(folder.file("accumulated"), data, {1, ""}, 1, 3));
  check_near(one, train_taught(folder.file("context"), data, {2, "--set dist.context=2"}));
  check_near(one, train_taught(folder.file("ranks"), data, {2, "--set dist.zero=1"}, 2));
  const std::string dense = kTaughtIndex + R"(--set 'train.stages=[{"steps": 4, "attention": "dense"}, )" +
                            R"({"steps": 8, "attention": "alternate"}]' )";
  const std::string whole = train_taught(folder.file("dense-one"), dense);
  check_near(whole, train_taught(folder.file("dense-context"), dense, {2, "--set dist.context=2"}));
  check_near(whole, train_taught(folder.file("dense-zero"), dense, {2, "--set dist.zero=3"}, 2));
}

TEST_CASE("taught: a resume is exact to the bit, recomputation too, also with Muon and bf16 moments", "[dist]") {
  const TemporaryFolder folder;
  int runs = 0;
  for (const std::string& keys : {kOneSoftmax, kTaughtIndex + "--set train.optimizer=muon --set model.qk_norm=true ",
                                  kOneSoftmax + "--set train.moments_dtype=bf16 --set train.index_lr_factor=3 "}) {
    INFO(keys);
    const std::string at = folder.file(std::to_string(runs++));
    const std::string whole = train_taught(at + "-whole", keys);
    const std::string saving = keys + "--set train.save_every=5 ";
    train_taught(at + "-resumed", saving);
    train_taught(at + "-resumed", saving + "--overwrite --resume " + at + "-resumed/checkpoints/step_5 ");
    CHECK(same_file(whole + kWeights, at + "-resumed" + kWeights));
    CHECK(same_file(whole + kWeights, train_taught(at + "-block", keys + "--set runtime.recompute=block ") + kWeights));
  }
}

TEST_CASE("taught: the index is clipped by its own norm and moves nothing else", "[dist]") {
  const TemporaryFolder folder;
  // All blocks fit into the lists, so that other weights do not depend on what the index selects.
  const auto run = [&](const std::string& name, const std::string& keys) {
    return train_taught(folder.file(name), kTaughtIndex + "--set nsa.n_sel=7 " + keys);
  };
  const std::string one = run("one", ""), loud = run("loud", "--set nsa.index_loss=1e6 "),
                    louder = run("louder", "--set nsa.index_loss=1e7 "),
                    still = run("still", "--set train.index_lr_factor=0 ");
  for (const std::string& other : {loud, louder, still}) CHECK(taught_distance(one, other, /*index=*/false) == 0);
  CHECK(taught_distance(one, still, /*index=*/true) > 1e-3);
  // Above train.grad_clip a louder loss has the same clipped gradient.
  CHECK(taught_distance(loud, louder, /*index=*/true) < 1e-4);
  const Json first = heartbeats(one, 0, "step_end").front(), first_loud = heartbeats(loud, 0, "step_end").front();
  CHECK(first_loud["index_grad_norm"].get<double>() ==
        Approx(1e6 * first["index_grad_norm"].get<double>()).epsilon(1e-4));
  CHECK(first_loud["grad_norm"] == first["grad_norm"]);
}

TEST_CASE("taught: keys and variables that do not fit name both keys and the value", "[dist]") {
  struct Refused {
    const char *keys, *variables;
    std::vector<const char*> named;
  };
  const std::string one = kOneSoftmax;
  const Refused refused[] = {
      {"--set nsa.branches=sel", "", {"nsa.branches is sel", "nsa.selector index", "compressed"}},
      {"--set nsa.selector=index --set nsa.d_index=7", "", {"nsa.d_index is 7", "even"}},
      {"--set nsa.selector=index --set nsa.d_index=258", "", {"nsa.d_index", "258", "256"}},
      {"--set nsa.selector=index --set nsa.d_index=0", "", {"nsa.d_index", "0", "2"}},
      {"--set nsa.select_every=3", "", {"nsa.select_every is 3", "nsa.l_sel 8"}},
      {"--set nsa.select_every=0", "", {"nsa.select_every", "0", "1"}},
      {"--set nsa.selector=best", "", {"nsa.selector", "best", "compressed"}},
      {"--set nsa.branches=sel,win", "", {"nsa.branches", "sel,win", "cmp,sel,win"}},
      {"--set nsa.index_loss=-1", "", {"nsa.index_loss", "-1"}},
      {"--set train.index_lr_factor=-1", "", {"train.index_lr_factor", "-1"}},
      {"ONE --set nsa.gate=sigmoid", "", {"nsa.gate is sigmoid", "nsa.branches"}},
      {"ONE --set nsa.gate_temperature=2", "", {"nsa.gate_temperature is 2", "nsa.branches"}},
      {"ONE --set nsa.gate_init=[0.2,0.3,0.5]", "", {"nsa.gate_init is [0.2, 0.3, 0.5]", "nsa.branches"}},
      {"ONE --set nsa.force_branch=sel", "", {"nsa.force_branch is sel", "nsa.branches"}},
      {"ONE", "NSA_FORCE_BRANCH=win", {"nsa.force_branch is win", "nsa.branches", "NSA_FORCE_BRANCH=win"}},
      {"ONE", "NSA_FORCE_UNIFORM_GATE=1", {"nsa.uniform_gate is true", "nsa.branches", "NSA_FORCE_UNIFORM_GATE=1"}},
      {"ONE", "NSA_STOPGRAD_GATES=1", {"nsa.stopgrad_gates is true", "nsa.branches", "NSA_STOPGRAD_GATES=1"}},
  };
  const TemporaryFolder folder;
  for (const Refused& r : refused) {
    const std::string keys = std::string_view(r.keys).starts_with("ONE") ? one + (r.keys + 3) : r.keys;
    const Outcome outcome = run_program(fmt::format("{} {}", train_args(folder.file("out")), keys), r.variables);
    INFO(keys << " " << r.variables << "\n" << outcome.output);
    CHECK(outcome.exit_code == 2);
    for (const char* word : r.named) CHECK(outcome.output.find(word) != std::string::npos);
  }
  // With one softmax, keys of other branches are neither needed nor checked.
  const Outcome fits = run_program("plan " TRIAD_SOURCE_DIR "/configs/tiny.json --set nsa.d=7 --set nsa.l=3 " + one);
  INFO(fits.output);
  CHECK(fits.exit_code == 0);
}

TEST_CASE("taught: init_from takes the weights of dense attention and of three branches", "[dist]") {
  const TemporaryFolder folder;
  const auto fresh = [&](const std::string& name, const std::string& keys) {
    return train_taught(folder.file(name), keys + "--set train.steps=0 ");
  };
  const auto weights = [](const std::string& out) { return tensors(out + kWeights); };
  const std::string three = train_taught(folder.file("three"), ""),
                    index = train_taught(folder.file("index"), kTaughtIndex),
                    dense = train_taught(folder.file("dense"), "--set model.attention=dense ");
  const std::string target = kOneSoftmax + "--set train.seed=4 ";
  const auto begun = weights(fresh("begun", target));
  for (const std::string& from : {three, index, dense}) {
    INFO(from);
    const auto theirs = weights(from), ours = weights(fresh("ours", target + "--set train.init_from=" + from + " "));
    CHECK(ours.size() == begun.size());
    for (const auto& [name, values] : ours) {
      INFO(name);
      const bool is_index = name.find(".attn.index_") != std::string::npos;
      CHECK(values == (is_index && from != index ? begun : theirs).at(name));
    }
    std::filesystem::remove_all(folder.file("ours"));
  }
  const auto added = weights(fresh("added", kTaughtIndex + "--set train.init_from=" + three + " "));
  for (const auto& [name, values] : weights(three)) CHECK(added.at(name) == values);
  // All blocks fit into the lists: the dense model's loss.
  const auto first_loss = [&](const std::string& out) {
    return heartbeats(out, 0, "step_end").front()["loss"].get<double>();
  };
  const std::string from = "--set train.init_from=" + dense + " ";
  const std::string control = train_taught(folder.file("control"), "--set model.attention=dense " + from);
  CHECK(first_loss(train_taught(folder.file("all"), kOneSoftmax + "--set nsa.n_sel=7 " + from)) ==
        Approx(first_loss(control)).epsilon(2e-6));
  // So has the first step of a dense warm-up, however few blocks the lists hold later.
  const std::string warm = train_taught(
      folder.file("warm"), kOneSoftmax + from +
                               R"(--set train.steps=null --set 'train.stages=[{"steps": 4, "attention": "dense"}, )" +
                               R"({"steps": 8}]' )");
  CHECK(first_loss(warm) == Approx(first_loss(control)).epsilon(2e-6));
  CHECK(taught_distance(warm, control, /*index=*/false) > 1e-6);
}

TEST_CASE("taught: the log of init_from says what begins fresh", "[dist]") {
  const TemporaryFolder folder;
  const std::string dense = folder.file("dense"), three = folder.file("three");
  struct Run {
    std::string out, keys, says;
  };
  const Run runs[] = {
      {dense, "--set model.attention=dense ", ""},
      {three, "--set train.init_from=" + dense + " ", "; 8 tensors begin fresh (gates)"},
      {folder.file("phi"), "--set nsa.phi=conv --set train.init_from=" + dense + " " + kTaughtIndex,
       "; 16 tensors begin fresh (gates, phi, index)"},
      {folder.file("sel"), "--set train.init_from=" + dense + " " + kOneSoftmax, "; 4 tensors begin fresh (index)"},
      {folder.file("index"), "--set train.init_from=" + three + " " + kTaughtIndex, "; 4 tensors begin fresh (index)"},
      {folder.file("mixed"), "--set model.dense_layers=0:1 --set train.init_from=" + dense + " " + kOneSoftmax,
       "; 2 tensors begin fresh (index)"},
      {folder.file("same"), "--set train.init_from=" + folder.file("sel") + " " + kOneSoftmax, ""},
  };
  for (const auto& [out, keys, says] : runs) {
    const Outcome outcome = run_program(train_args(out, keys + "--set train.steps=1 "));
    INFO(keys << "\n" << outcome.output);
    REQUIRE(outcome.exit_code == 0);
    const bool has_init = keys.find("init_from") != std::string::npos;
    CHECK((outcome.output.find("begins with the weights of ") != std::string::npos) == has_init);
    if (has_init) CHECK(outcome.output.find(kWeights + says + "\n") != std::string::npos);
  }
}
