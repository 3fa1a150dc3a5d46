// The phases that train the doctor's own model. Their runs' files must keep absolute limits and agree with the baseline
// phase's run.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <random>

#include "io/file.h"
#include "tools/csv_table.h"
#include "tools/doctor/doctor.h"

namespace triad {

namespace {

// The training text, the same on every machine: random words from a small vocabulary. In eight steps the loss falls by
// more than half a nat from ln 256.
std::string doctor_text() {
  constexpr size_t kBytes = 1 << 16;
  const char* words[] = {"attention", "block", "compressed", "gate", "gradient", "query", "selected", "window"};
  std::mt19937 random(1);
  std::string text;
  while (text.size() < kBytes)
    text += std::string(words[random() % std::size(words)]) + (random() % 8 == 0 ? ".\n" : " ");
  return text;
}

// Expects a run's final weights to have the same bits as the baseline's.
void expect_same_bits(PhaseRun& v, const TrainedRun& run) {
  const WeightDifference d = compare_weights(run.folder, v.folder_of("baseline"));
  v.expect(d.unequal == 0, fmt::format("all {} tensors have the bits of baseline/model.safetensors", d.tensors),
           fmt::format("{} of {} tensors differ from baseline/model.safetensors, first {}; relative difference {:.2e}, "
                       "most in {} ({:.2e})",
                       d.unequal, d.tensors, d.first, d.relative, d.worst_name, d.worst));
}

// Expects a run's weights to be close to the baseline's, for runs that add numbers in another order. The first
// gradient's norm must agree up to fp32 rounding. Weights agree less: Adam turns a tiny gradient with another sign into
// a full step. A gradient that is lost or counted twice changes the weights by a tenth or more.
void expect_close_weights(PhaseRun& v, const TrainedRun& run) {
  constexpr double kMostNorm = 1e-5, kMost = 1e-3;
  const TrainedRun one = read_trained(v.folder_of("baseline"), kDoctorSteps, 1);
  const double norm = std::abs(run.norms.front() / one.norms.front() - 1);
  v.expect(norm <= kMostNorm, fmt::format("the first gradient's norm is baseline's to {:.0e}", kMostNorm),
           fmt::format("the first gradient's norm is {}, baseline's {}", run.norms.front(), one.norms.front()));
  const WeightDifference d = compare_weights(run.folder, one.folder);
  v.expect(
      d.relative <= kMost,
      fmt::format("weights {:.1e} from baseline/model.safetensors (limit {:.0e})", d.relative, kMost),
      fmt::format("weights differ by {:.2e} from baseline/model.safetensors, more than rounding explains ({:.0e}); "
                  "most in {} ({:.2e})",
                  d.relative, kMost, d.worst_name, d.worst));
}

void expect_learning(PhaseRun& v, const TrainedRun& run) {
  constexpr double kLeast = 0.3;  // the loss must fall by at least this, nats
  const double fall = run.losses.front() - run.losses.back();
  v.expect(fall >= kLeast, fmt::format("loss {:.3f} -> {:.3f}", run.losses.front(), run.losses.back()),
           fmt::format("loss {:.3f} -> {:.3f} in {} steps: it must fall by {} (training.csv)", run.losses.front(),
                       run.losses.back(), run.losses.size(), kLeast));
}

// Expects that the gradient ledger lists all parameters in every step, and that none is missing, unexpectedly zero or
// not finite.
void expect_whole_ledger(PhaseRun& v, const TrainedRun& run) {
  size_t steps = 0;
  for (const std::string& line : whole_lines(run.file("ranks/rank_0.log"))) {
    if (!line.starts_with("[GRAD-TRACE] after_backward_step")) continue;
    ++steps;
    const std::string right = fmt::format(" arrived={} missing=0 ", run.tensors);
    if (line.find(right) == std::string::npos || line.find(" unexpected_zero=0 not_finite=0") == std::string::npos)
      v.expect(false, "", fmt::format("\"{}\": expected{}and no gradient that is zero or not finite", line, right));
  }
  v.expect(steps == run.losses.size(), fmt::format("arrived={} missing=0 in all {} steps", run.tensors, steps),
           fmt::format("ranks/rank_0.log has {} [GRAD-TRACE] lines for {} steps", steps, run.losses.size()));
}

void expect_transport(PhaseRun& v, const TrainedRun& run, const std::string& word) {
  const std::string name = run.env.value("comm", "");
  v.expect(name.find(word) != std::string::npos, name, fmt::format("env.json says comm \"{}\", not {}", name, word));
}

// Config changes for two ranks: one micro-step then has the sequences from the baseline's two micro-steps.
const std::vector<std::string> kAsTwoRanks = {"train.accumulate_grad_batches=1", "log.diagnostics=[\"buckets\"]"};

TrainedRun train_two(PhaseRun& v, PhaseRun::Launch launch, const std::string& backend) {
  std::vector<std::string> sets = kAsTwoRanks;
  sets.push_back("dist.backend=" + backend);
  TrainedRun run = v.train_ranks(2, launch, sets);
  for (const char* file : {"ddp_buckets.txt", "ddp_buckets_rank1.txt"}) {
    const size_t rows = whole_lines(run.file(file)).size();
    v.expect(rows > run.losses.size(), "", fmt::format("{} has {} lines for {} steps", file, rows, run.losses.size()));
  }
  expect_close_weights(v, run);
  return run;
}

void need_two_gpus(PhaseRun& v) {
  if (v.on_gpu() && v.gpus() < 2) v.skip("this machine has one GPU: two ranks need two", "nothing");
}

}  // namespace

void write_doctor_config(const std::string& out, bool on_gpu) {
  write_file_atomically(out + "/text.txt", doctor_text());
  const int64_t head = on_gpu ? 64 : 16, block = on_gpu ? 64 : 8;
  const Json config = {{"model",
                        {{"dim", 16 * head / 4},
                         {"n_layers", kDoctorLayers},
                         {"n_heads", 4},
                         {"n_kv_groups", 2},
                         {"d_k", head},
                         {"d_v", head},
                         {"vocab_size", 256}}},
                       {"nsa", {{"l", block / 2}, {"d", block / 4}, {"l_sel", block}, {"n_sel", 6}, {"w", 2 * block}}},
                       {"data", {{"kind", "text"}, {"paths", {out + "/text.txt"}}}},
                       {"train",
                        {{"steps", kDoctorSteps},
                         {"seq_len", 16 * block},
                         {"micro_batch_size", 2},
                         {"accumulate_grad_batches", 2},
                         {"lr", 3e-3},
                         {"warmup_steps", 2},
                         {"save_last", false}}},
                       {"runtime", {{"precision", on_gpu ? "bf16" : "fp32"}}},
                       {"log", {{"out_dir", out + "/run"}, {"every", 1}}}};
  write_file_atomically(out + "/doctor.json", dump_json(config, 2) + "\n");
}

void examine_baseline(PhaseRun& v) {
  const TrainedRun run = v.train();
  const Json& model = run.config["model"];
  const double std = model["init_std"], expected = std::log(256.0) + model["dim"].get<double>() * std * std / 2;
  constexpr double kNear = 0.15;
  v.expect(
      std::abs(run.losses.front() - expected) < kNear, "",
      fmt::format("the first loss is {:.3f}, about {:.3f} is expected of fresh weights", run.losses.front(), expected));
  expect_learning(v, run);
  v.expect(!v.on_gpu() || run.fallbacks == 0 || v.machine()["compute_capability"] != 90, "",
           fmt::format("{} calls fell back to slower kernels (fallback_counters.csv)", run.fallbacks));
  v.note(fmt::format("{} tensors, {:.0f} tokens/s, peak {:.0f} MiB", run.tensors,
                     run.metrics["tokens_per_s"].get<double>(), run.metrics["peak_mib"].get<double>()));
}

// Checks gate and selection statistics in the baseline's run. A fresh model's gates are a third each, and none may
// collapse in eight steps. How many tokens a row selects follows from its position.
void examine_health(PhaseRun& v) {
  const std::string gates_path = v.folder_of("baseline") + "/gates.csv",
                    lists_path = v.folder_of("baseline") + "/k_stats.csv";
  for (const std::string& path : {gates_path, lists_path})
    TRIAD_CHECK(std::filesystem::exists(path), "{} is missing: log.stats, which is on, writes it", path);
  std::filesystem::copy_file(v.folder_of("baseline") + "/env.json", v.file("env.json"));
  const CsvTable gates(gates_path, {"step", "layer", "entropy_mean", "max_mean", "collapse_frac", "cmp", "sel", "win"});
  const CsvTable lists(lists_path, {"step", "layer", "k_mean", "k_max"});
  constexpr size_t kRows = static_cast<size_t>(kDoctorLayers) * kDoctorSteps;
  v.expect(gates.size() == kRows && lists.size() == kRows, "",
           fmt::format("gates.csv has {} rows and k_stats.csv {}, for {} layers and {} steps", gates.size(),
                       lists.size(), kDoctorLayers, kDoctorSteps));
  const auto row_name = [](const CsvTable& table, size_t i) {
    return fmt::format("step {} layer {}", table.text(i, "step"), table.text(i, "layer"));
  };
  constexpr double kNear = 0.01, kLeastEntropy = 0.5, kMostMax = 0.9, kMostCollapsed = 0.01;
  double least_entropy = std::log(3.0);
  for (size_t i = 0; i < gates.size(); ++i) {
    const double entropy = gates.number(i, "entropy_mean"), largest = gates.number(i, "max_mean"),
                 collapsed = gates.number(i, "collapse_frac");
    least_entropy = std::min(least_entropy, entropy);
    double sum = 0;
    for (const char* branch : {"cmp", "sel", "win"}) {
      const double share = gates.number(i, branch);
      sum += share;
      v.expect(gates.number(i, "step") > 1 || std::abs(share - 1.0 / 3) < kNear, "",
               fmt::format("{}: {} has a share of {:.3f}, 1/3 is expected of fresh gates", row_name(gates, i), branch,
                           share));
    }
    v.expect(std::abs(sum - 1) < kNear, "",
             fmt::format("{}: the branches' shares add up to {:.3f}", row_name(gates, i), sum));
    v.expect(entropy > kLeastEntropy && largest < kMostMax && collapsed < kMostCollapsed, "",
             fmt::format("{}: entropy {:.3f}, largest gate {:.3f}, {:.1f}% collapsed", row_name(gates, i), entropy,
                         largest, 100 * collapsed));
  }
  v.note(fmt::format("no layer's gate entropy is below {:.3f} (ln 3 = 1.099)", least_entropy));
  const std::string config_path = v.folder_of("baseline") + "/config.json";
  const Json config = parse_json(read_file(config_path), config_path);
  const int64_t T = config["train"]["seq_len"], block = config["nsa"]["l_sel"], n = config["nsa"]["n_sel"];
  int64_t tokens = 0;
  for (int64_t t = 0; t < T; ++t) tokens += std::min((n - 1) * block, t / block * block) + t % block + 1;
  const double mean = static_cast<double>(tokens) / static_cast<double>(T);
  const auto most = static_cast<double>(std::min(n * block, T));
  for (size_t i = 0; i < lists.size(); ++i)
    v.expect(std::abs(lists.number(i, "k_mean") - mean) < kNear && lists.number(i, "k_max") == most, "",
             fmt::format("{}: a row selects {} tokens in the mean and {} at most; {} and {} are expected",
                         row_name(lists, i), lists.text(i, "k_mean"), lists.text(i, "k_max"), mean, most));
  v.note(fmt::format("a row selects {} tokens in the mean, as expected", mean));
}

void examine_repeat(PhaseRun& v) { expect_same_bits(v, v.train()); }

void examine_gradient_trace(PhaseRun& v) {
  const TrainedRun run = v.train({"train.steps=1", "log.diagnostics=[\"ledger\",\"layer_norms\",\"backward\"]"});
  expect_whole_ledger(v, run);
  const std::vector<std::string> missing = whole_lines(run.file("all_missing_params.txt"));
  v.expect(missing.size() == 1, "", fmt::format("all_missing_params.txt names {} parameters", missing.size() - 1));
  const CsvTable ledger(run.file("grad_ledger.csv"), {"step", "parameter", "norm"});
  v.expect(static_cast<int64_t>(ledger.size()) == run.tensors, "",
           fmt::format("grad_ledger.csv has {} rows for {} tensors", ledger.size(), run.tensors));
  // The layer order in traces.log must be backward's, from the last layer to the first.
  std::vector<std::string> order;
  for (const std::string& line : whole_lines(run.file("traces.log")))
    if (line.starts_with("layer ") && line.find(" in all ") != std::string::npos) order.push_back(line.substr(6, 1));
  std::vector<std::string> expected;
  for (int layer = kDoctorLayers - 1; layer >= 0; --layer) expected.push_back(std::to_string(layer));
  v.expect(
      order == expected, "traces.log has every layer, the last one first",
      fmt::format("traces.log has {} layers of {}, or not from the last to the first", order.size(), kDoctorLayers));
}

void examine_backend_nccl(PhaseRun& v) {
  if (!v.on_gpu()) v.skip("no GPU: NCCL connects GPUs", "nothing");
  need_two_gpus(v);
  if (const std::string why = v.machine()["why_no_nccl"]; !why.empty())
    v.skip(why, "install NCCL (libnccl.so.2), or use dist.backend=mpi");
  const TrainedRun run = train_two(v, PhaseRun::Launch::variables, "nccl");
  expect_transport(v, run, "NCCL");
}

void examine_backend_mpi(PhaseRun& v) {
  need_two_gpus(v);
  v.require(PhaseRun::Launch::mpirun);
  const TrainedRun run = train_two(v, PhaseRun::Launch::mpirun, "mpi");
  expect_transport(v, run, "MPI");
  if (!v.holds("backend_nccl")) return;
  const WeightDifference d = compare_weights(run.folder, v.folder_of("backend_nccl"));
  v.expect(d.unequal == 0, "weights equal to backend_nccl's in every bit",
           fmt::format("{} of {} tensors differ from backend_nccl's, which sums the same two numbers (relative {:.2e})",
                       d.unequal, d.tensors, d.relative));
}

void examine_backend_tcp(PhaseRun& v) {
  if (v.on_gpu()) v.skip("ranks on GPUs sum over NCCL or MPI, not TCP", "nothing");
  const TrainedRun run = train_two(v, PhaseRun::Launch::variables, "auto");
  expect_transport(v, run, "TCP");
}

void examine_branch(PhaseRun& v, const std::string& branch) {
  const TrainedRun run = v.train({"nsa.force_branch=" + branch, "log.diagnostics=[\"ledger\"]"});
  expect_learning(v, run);
  expect_whole_ledger(v, run);
  // With one branch forced, only that branch's own projections may have a gradient.
  const CsvTable ledger(run.file("grad_ledger.csv"), {"step", "parameter", "norm"});
  size_t own = 0, others = 0;
  std::string first;
  for (size_t i = 0; i < ledger.size(); ++i) {
    const std::string& name = ledger.text(i, "parameter");
    for (const char* other : {"cmp", "sel", "win"}) {
      if (name.find(fmt::format("_{}_proj", other)) == std::string::npos) continue;
      const bool has_gradient = ledger.number(i, "norm") > 0;
      own += has_gradient && other == branch;
      others += has_gradient && other != branch;
      if (has_gradient != (other == branch) && first.empty()) first = name;
    }
  }
  // K_proj and v_proj, in each layer and step.
  const size_t expected = static_cast<size_t>(2 * kDoctorLayers) * run.losses.size();
  v.expect(own == expected && others == 0, fmt::format("gradients only in k_{0}_proj and v_{0}_proj", branch),
           fmt::format("grad_ledger.csv: {} of its {} projections have a gradient, and {} of other branches; first {}",
                       own, expected, others, first));
}

void examine_cuda_graph(PhaseRun& v) {
  if (!v.on_gpu()) v.skip("no GPU: graphs need CUDA", "nothing");
  expect_same_bits(v, v.train({"runtime.cuda_graph=true"}));
}

void examine_recompute(PhaseRun& v, const std::string& plan) {
  const TrainedRun run = v.train({"runtime.recompute=" + plan});
  expect_same_bits(v, run);
  const std::string kept = v.folder_of("baseline") + "/metrics.json";
  const double peak = run.metrics["peak_mib"], whole = parse_json(read_file(kept), kept)["peak_mib"];
  v.expect(peak < whole, fmt::format("peak {:.1f} MiB, {:.1f} MiB without recomputation", peak, whole),
           fmt::format("peak {:.1f} MiB is not below baseline's {:.1f}: nothing was recomputed", peak, whole));
}

void examine_kernel_routes(PhaseRun& v) {
  if (!v.on_gpu()) v.skip("no GPU: the CPU has only the reference kernels", "nothing");
  const TrainedRun run = v.train({"runtime.kernels=reference"}),
                   fused = read_trained(v.folder_of("baseline"), kDoctorSteps, 1);
  double difference = 0;
  for (size_t i = 0; i < run.losses.size(); ++i)
    difference = std::max(difference, std::abs(run.losses[i] - fused.losses[i]));
  constexpr double kMost = 0.05;  // nats: rounding to bf16 in other places changes the loss by less
  v.expect(difference > 0 && difference <= kMost,
           fmt::format("losses within {:.1e} of baseline's (limit {})", difference, kMost),
           difference > 0
               ? fmt::format("losses differ by up to {:.3g} from baseline's, more than rounding explains ({})",
                             difference, kMost)
               : "losses equal baseline's in every digit: the reference kernels did not run");
}

}  // namespace triad
