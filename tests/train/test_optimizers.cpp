// Whole runs with train.schedule and train.optimizer.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/rng.h"
#include "io/safetensors.h"
#include "io/weight_index.h"
#include "tests/support/dist_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/muon_reference.h"
#include "tests/support/report_page.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/config/schedule.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kMuon = "--set train.optimizer=muon ";

std::set<std::string> names(const std::string& path) {
  std::set<std::string> all;
  const SafetensorsFile file(path);
  for (const TensorEntry& entry : file.entries()) all.insert(entry.name);
  return all;
}

// Whether a parameter is one that Muon is to update, by its name.
bool is_matrix(const std::string& name) {
  if (name.find("attn.gate.") != std::string::npos || name.find("attn.phi_") != std::string::npos) return false;
  return name.ends_with("_proj.weight") || name.ends_with("mlp.fc1.weight") || name.ends_with("mlp.fc2.weight");
}

void check_repeats_and_resumes(const std::string& more) {
  const TemporaryFolder folder;
  const std::string keys = kMuon + more + "--set train.save_every=7 --set train.keep_last=0 ";
  const std::string a = run(folder.file("a"), 1, keys), b = run(folder.file("b"), 1, keys),
                    moments = "/optimizer.safetensors";
  run(b, 1, keys + "--overwrite --resume " + b + "/checkpoints/step_7");
  CHECK(same_file(a + kWeights, b + kWeights));
  CHECK(same_file(a + "/checkpoints/step_14" + moments, b + "/checkpoints/step_14" + moments));
}

// Matrices with 16,384 elements, as many as a shard has in the smallest bucket, cross the ranks' shards.
const std::string kOnTwoRanks =
    kMuon + "--set train.steps=6 --set train.save_every=3 --set dist.bucket_mb=0.02 " + "--set model.mlp_hidden=512 ";

// Two ranks at each dist.zero level. Returns the folder of the run with whole state.
std::string check_zero_stages(const TemporaryFolder& folder, const std::string& more) {
  const std::string step = "/checkpoints/step_3", keys = kOnTwoRanks + more;
  std::vector<std::string> runs;
  for (const std::string zero : {"0", "1", "2", "3"})
    runs.push_back(run(folder.file(zero), 2, keys + "--set dist.zero=" + zero));
  // Sums over the ranks are taken after the last micro-step with 0 and 1, after each with 2 and 3.
  for (const auto& [a, b] : {std::pair<size_t, size_t>{0, 1}, {2, 3}})
    for (const auto& [of, stem] :
         {std::pair<std::string, const char*>{"", kWeightsStem}, {step, kWeightsStem}, {step, kMomentsStem}}) {
      INFO(of << "/" << stem << ", dist.zero " << a << " and " << b);
      CHECK(tensors(tensors_path(runs[a] + of, stem)) == tensors(tensors_path(runs[b] + of, stem)));
    }
  const std::string resumed = run(folder.file("resumed"), 2, keys + "--set dist.zero=3 --resume " + runs[3] + step);
  CHECK(tensors(tensors_path(resumed)) == tensors(tensors_path(runs[3])));
  return runs[0];
}

}  // namespace

TEST_CASE("schedule: a wsd run whose rate has not fallen yet goes on with more steps, to the same bits", "[train]") {
  const TemporaryFolder folder;
  const std::string wsd = "--set train.schedule=wsd ",
                    longer = wsd + "--set train.steps=12 --set train.decay_fraction=0.5 ";
  const std::string whole = run(folder.file("whole"), 1, longer), stable = folder.file("stable");
  run(stable, 1, wsd + "--set train.steps=6 --set train.decay_fraction=0 ");
  run(stable, 1, longer + "--resume latest");
  CHECK(same_file(whole + kWeights, stable + kWeights));
  std::map<int, double> rates = column(stable + "/training.csv", "lr");
  for (int step = 3; step <= 6; ++step) CHECK(rates[step] == Approx(1e-3));  // tiny.json's lr, after two warm-up steps
  for (int step = 7; step <= 12; ++step) CHECK(rates[step] == Approx(1e-4 + 9e-4 * (13 - step) / 6.0));
}

TEST_CASE("schedule: a resume that lets the learning rate jump says so, and the report shows it", "[train]") {
  const TemporaryFolder folder;
  const std::string cosine = "--set train.min_lr_fraction=0.1 --set log.heartbeat_every=1 ";
  const std::string out = folder.file("run");
  run(out, 1, cosine + "--set train.steps=6 ");
  // Resumes in a copy of the folder; returns that folder and the output.
  int copies = 0;
  const auto resumed = [&](const std::string& more, const std::string& of) {
    const std::string copy = folder.file("copy_" + std::to_string(copies++));
    fs::copy(of, copy, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
    const Outcome outcome = run_program("train --resume " + copy + " " + more);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return std::pair{copy, outcome.output};
  };
  const auto events = [](const std::string& run_folder) { return heartbeats(run_folder, 0, "lr_jump"); };
  const auto [longer, output] = resumed("--set train.steps=60", out);
  std::map<int, double> rates = column(longer + "/training.csv", "lr");
  CHECK(rates[7] > 3 * rates[6]);
  CHECK(has(output, fmt::format("warning: the learning rate jumps from {:.2e} in step 6 to {:.2e} in step 7, because "
                                "train.steps 6 -> 60 changes the schedule cosine",
                                rates[6], rates[7])));
  REQUIRE(events(longer).size() == 1);
  CHECK(events(longer)[0]["step"] == 6);
  CHECK(events(longer)[0]["lr_before"] == Approx(rates[6]));
  CHECK(events(longer)[0]["lr"] == Approx(rates[7]));
  const Json shown = data_of(report(longer))[0]["events"];
  CHECK(std::any_of(shown.begin(), shown.end(), [](const Json& event) {
    return event["kind"] == "lr_jump" && has(event["text"], "the learning rate jumps from ");
  }));
  // What the message recommends avoids the jump.
  const std::string begin = "; here ", end = " goes on without one";
  const size_t from = output.find(begin) + begin.size();
  REQUIRE(output.find(end) > from);
  const auto [steady, calm] = resumed("--set train.steps=60 " + output.substr(from, output.find(end) - from), out);
  CHECK_FALSE(has(calm, "jumps"));
  CHECK(events(steady).empty());
  CHECK(column(steady + "/training.csv", "lr")[7] == Approx(rates[6]).epsilon(0.01));
  // Nothing to say: the same schedule, a train.lr set by the user, wsd before its decay.
  CHECK_FALSE(has(resumed("--set train.steps=7 --set train.lr=1e-4", longer).second, "jumps"));
  const std::string stable = folder.file("stable"), wsd = "--set train.schedule=wsd --set train.decay_fraction=0 ";
  run(stable, 1, wsd + "--set train.steps=6 ");
  CHECK_FALSE(has(resumed("--set train.steps=20", stable).second, "jumps"));
  // After its decay.
  const std::string decayed = folder.file("decayed");
  run(decayed, 1, "--set train.schedule=wsd --set train.decay_fraction=0.5 --set train.steps=6 ");
  CHECK(has(resumed("--set train.steps=20", decayed).second,
            "resume from a checkpoint before the decay of train.schedule wsd, which began after step 3"));
}

TEST_CASE("muon: a step updates each projection alone by Muon's formula, and the rest by AdamW's", "[train]") {
  for (const std::vector<std::string>& more : {std::vector<std::string>{"nsa.phi=mlp", "model.qkv_bias=true"},
                                               {"model.mlp=swiglu", "model.tie_embeddings=true"}}) {
    std::vector<std::string> sets = {"train.optimizer=muon", "train.micro_batch_size=1"};
    sets.insert(sets.end(), more.begin(), more.end());
    const Config config = load_config(kTiny, sets).config;
    const TrainConfig& c = config.train;
    const std::unique_ptr<Runtime> runtime = allocate_planned(config, Device::cpu());
    TrainStep step(*runtime, config);
    const Params& params = step.model().params();
    step.optimizer().init(runtime->ctx(), 7);
    const auto read_all = [&](const Tensor& t) {
      std::vector<float> host(static_cast<size_t>(t.numel()));
      read(runtime->ctx(), host.data(), t);
      return Doubles(host.begin(), host.end());
    };
    std::vector<int32_t> tokens, targets;
    for (int64_t i = 0; i < c.seq_len; ++i) {
      tokens.push_back(static_cast<int32_t>(Philox(9, 0).below(static_cast<uint64_t>(i), 256)));
      targets.push_back(static_cast<int32_t>(Philox(9, 1).below(static_cast<uint64_t>(i), 256)));
    }
    Doubles want = read_all(params.master()), m(want.size());
    const double rate = learning_rate(c, 5);
    step.begin();
    step.micro_step(tokens, targets, c.seq_len);
    const double clip = std::min(1.0, c.grad_clip / (step.finish(5, c.seq_len).grad_norm + 1e-6));
    const Doubles after = read_all(params.master()), grads = read_all(params.grads());
    int64_t matrices = 0;
    for (int64_t i = 0; i < params.count(); ++i) {
      const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
      const int64_t first = params.offset(i), size = spec.shape.numel();
      const double decay = spec.shape.rank >= 2 ? c.weight_decay : 0;
      if (is_matrix(spec.name)) {
        ++matrices;
        muon_reference(want, m, grads, first, spec.shape[0], spec.shape[1],
                       {.lr = rate, .momentum = 0.95, .weight_decay = decay, .clip = clip});
      } else {
        for (int64_t j = first; j < first + size; ++j) {
          const auto at = static_cast<size_t>(j);
          const double g = clip * grads[at], m_hat = (1 - c.beta1) * g / (1 - std::pow(c.beta1, 6)),
                       v_hat = (1 - c.beta2) * g * g / (1 - std::pow(c.beta2, 6));
          want[at] -= rate * (decay * want[at] + m_hat / (std::sqrt(v_hat) + c.eps));
        }
      }
      double largest = 0;
      for (int64_t j = first; j < first + size; ++j)
        largest = std::max(largest, std::abs(after[static_cast<size_t>(j)] - want[static_cast<size_t>(j)]));
      INFO(spec.name);
      CHECK(largest < 2e-3 * rate);
    }
    CHECK(matrices == 2 * (c.optimizer == OptimizerKind::muon && config.model.mlp == MlpKind::swiglu ? 11 : 10));
  }
}

TEST_CASE("muon: runs repeat and resume to the bit, with momentum alone of matrices in their checkpoints", "[train]") {
  check_repeats_and_resumes("");
  check_repeats_and_resumes(
      "--set runtime.precision=bf16 --set train.moments_dtype=bf16 --set train.master_dtype=none "
      "--set train.grads_dtype=bf16 ");

  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, kMuon + "--set train.steps=2 "),
                    checkpoint = out + "/checkpoints/step_2", moments = checkpoint + "/optimizer.safetensors";
  const std::set<std::string> weights = names(checkpoint + kWeights), kept = names(moments);
  for (const std::string& name : weights) {
    INFO(name);
    CHECK(kept.contains("exp_avg/" + name));
    CHECK(kept.contains("exp_avg_sq/" + name) == !is_matrix(name));
  }
  const Outcome refused = run_program(train_args(folder.file("adamw"), "--resume " + checkpoint));
  CHECK(refused.exit_code == 1);
  INFO(refused.output);
  CHECK(has(refused.output, "train.optimizer is \"muon\", the config's is \"adamw\""));
}

TEST_CASE("muon: runs repeat and resume to the bit on the GPU", "[train][gpu]") {
  if (!require_gpu()) return;
  for (const std::string more : {"", "--set runtime.precision=bf16 ",
                                 "--set runtime.precision=bf16 --set train.moments_dtype=bf16 "
                                 "--set train.master_dtype=none --set train.grads_dtype=bf16 "}) {
    INFO(more);
    check_repeats_and_resumes("--set runtime.device=cuda --set train.allow_unsafe=true " + more);
  }
}

TEST_CASE("muon: two ranks give the bits of whole state in every stage of dist.zero, and resume to the bit", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string whole = check_zero_stages(folder, ""), alone = run(folder.file("alone"), 1, kOnTwoRanks);
  CHECK(difference(alone + kWeights, tensors_path(whole)).all < 1e-4);
}

TEST_CASE("muon: two GPUs give the bits of whole state in every stage of dist.zero, and resume to the bit",
          "[dist][gpu2]") {
  if (!require_gpus(2) || !require_mpirun()) return;
  const TemporaryFolder folder;
  check_zero_stages(folder, "--set runtime.device=cuda --set runtime.precision=bf16 ");
}

TEST_CASE("muon: the memory plan counts no second moment of matrices", "[train]") {
  const auto blocks = [&](const std::string& optimizer) {
    std::map<std::string, int64_t> bytes;
    std::vector<MemorySnapshot::Block> all;
    plan_memory(load_config(kTiny, {"train.optimizer=" + optimizer}).config, Device::cpu(), nullptr, 0, &all);
    for (const MemorySnapshot::Block& block : all) bytes[block.name] += block.bytes;
    return bytes;
  };
  std::map<std::string, int64_t> adamw = blocks("adamw"), muon = blocks("muon");
  for (const ParamSpec& spec : param_specs(load_config(kTiny, {}).config.model)) {
    INFO(spec.name);
    CHECK(adamw.at("exp_avg_sq/" + spec.name) == 4 * spec.stored().numel());
    CHECK(muon["exp_avg/" + spec.name] == 4 * spec.stored().numel());
    CHECK(muon["exp_avg_sq/" + spec.name] == (is_matrix(spec.name) ? 0 : 4 * spec.stored().numel()));
  }
}
