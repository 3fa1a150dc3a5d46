// Training with runtime.matmul_dtype fp8: whole runs.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>

#include "io/json_config.h"
#include "io/weight_index.h"
#include "kernels/ops/cast_e4m3.h"
#include "model/fp8.h"
#include "tests/support/checked_run.h"
#include "tests/support/dist_run.h"
#include "tests/support/grads_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;

namespace {

const std::string kFp8 = "--set runtime.matmul_dtype=fp8 ";

std::string weights_text(const std::string& folder) { return read_text(folder + kWeights); }

void check_fp8_bits_and_resume(const std::string& device, const std::string& precision) {
  const TemporaryFolder folder;
  const std::string more =
      kFp8 + "--set train.accumulate_grad_batches=2 --set train.eval_every=5 --set runtime.precision=" + precision +
      " ";
  run_ok(train_on(folder.file("a"), device, more));
  run_ok(train_on(folder.file("b"), device, more));
  REQUIRE(!weights_text(folder.file("a")).empty());
  CHECK(weights_text(folder.file("a")) == weights_text(folder.file("b")));
  run_ok(train_on(folder.file("b"), device, more + "--set train.save_every=7 --overwrite"));
  run_ok(train_on(folder.file("b"), device,
                  more + "--set train.save_every=7 --overwrite --resume " + folder.file("b/checkpoints/step_7")));
  CHECK(weights_text(folder.file("a")) == weights_text(folder.file("b")));
}

}  // namespace

TEST_CASE("fp8: two runs and a resumed one have the same bits", "[fp8]") {
  check_fp8_bits_and_resume("cpu", "fp32");
  check_fp8_bits_and_resume("cpu", "bf16");
}

TEST_CASE("fp8: two runs and a resumed one have the same bits on the GPU", "[fp8][gpu]") {
  if (!require_gpu()) return;
  check_fp8_bits_and_resume("cuda", "bf16 --set runtime.cuda_graph=true");
}

TEST_CASE("fp8: the loss falls as it does without, and only layers that are not excluded differ", "[fp8]") {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 300; ++i) text += fmt::format("{} times {} is {}. ", i % 7, i % 5, i % 7 * (i % 5));
  write_text(folder.file("text.txt"), text);
  const std::string more =
      "--set train.steps=60 --set train.lr=3e-3 --set data.kind=text --set data.paths=" + folder.file("text.txt") + " ";
  run_ok(train_on(folder.file("without"), "cpu", more));
  run_ok(train_on(folder.file("with"), "cpu", more + kFp8));
  const std::map<int, double> without = column(folder.file("without/training.csv"), "loss"),
                              with = column(folder.file("with/training.csv"), "loss");
  CHECK(with.rbegin()->second < with.begin()->second - 0.5);
  CHECK(with.rbegin()->second == Approx(without.rbegin()->second).margin(0.05));
  CHECK(!same_file(folder.file("with") + kWeights, folder.file("without") + kWeights));
  run_ok(train_on(folder.file("excluded"), "cpu", more + kFp8 + "--set runtime.fp8_exclude=0:2"));
  CHECK(same_file(folder.file("excluded") + kWeights, folder.file("without") + kWeights));
}

TEST_CASE("fp8: a step's casts are counted once, in all its micro-steps", "[fp8][stats]") {
  for (const std::string recompute : {"none", "mlp", "block"}) {
    INFO(recompute);
    const Config config = load_config(TRIAD_SOURCE_DIR "/configs/tiny.json",
                                      {"runtime.matmul_dtype=fp8", "runtime.device=cpu", "model.mlp=swiglu",
                                       "train.accumulate_grad_batches=2", "runtime.recompute=" + recompute})
                              .config;
    const std::unique_ptr<Runtime> runtime = allocate_planned(config, Device::cpu());
    TrainStep step(*runtime, config);
    step.model().params().init(runtime->ctx(), 7);
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < 2 * 48; ++i) tokens.push_back(i * 13 % 256);
    constexpr int64_t kPositions = 2 * 2 * 48, kRows = 6, kLayers = 2, kMicroSteps = 2;  // rows 0, 16, ..., 80 count
    for (int64_t number = 0; number < 2; ++number) {
      step.begin(false, number);
      for (int64_t i = 0; i < kMicroSteps; ++i) step.micro_step(tokens, tokens, kPositions);
      const TrainStep::Result result = step.finish(number, kPositions);
      REQUIRE(result.fp8_counts.size() == size_t{Fp8Role::count} * E4m3Counts::count);
      const auto values = [&](int64_t role) {
        return result.fp8_counts[static_cast<size_t>(role * E4m3Counts::count + E4m3Counts::values)];
      };
      constexpr int64_t kDim = 32, kQkv = 128, kHidden = 128, kCasts = kRows * kLayers * kMicroSteps;
      CHECK(values(Fp8Role::qkv_x) == kCasts * kDim);
      CHECK(values(Fp8Role::qkv_dy) == kCasts * kQkv);
      CHECK(values(Fp8Role::out_proj_x) == kCasts * kDim);
      CHECK(values(Fp8Role::out_proj_dy) == kCasts * kDim);
      CHECK(values(Fp8Role::mlp_in_x) == kCasts * kDim);
      CHECK(values(Fp8Role::mlp_in_dy) == kCasts * 2 * kHidden);
      CHECK(values(Fp8Role::mlp_out_x) == kCasts * kHidden);
      CHECK(values(Fp8Role::mlp_out_dy) == kCasts * kDim);
      constexpr int64_t kElements = kDim * (kQkv + kDim + 3 * kHidden);
      CHECK(values(Fp8Role::weight_rows) == kMicroSteps * kLayers * kElements / kE4m3CountedRows);
      CHECK(values(Fp8Role::weight_columns) == kMicroSteps * kLayers * kElements / kE4m3CountedRows);
    }
  }
}

TEST_CASE("fp8: what casts lose is reported by tensor role", "[fp8][stats]") {
  const TemporaryFolder folder;
  // Half of dqkv is 0, the gradient of keys and values of the two branches that are not used. Of the rows that count, a
  // third are first tokens, whose queries, a quarter of dqkv, choose nothing.
  constexpr double kZeros = 0.5 + 0.25 / 3;
  const std::string more = kFp8 + "--set train.steps=4 --set log.every=2 --set nsa.force_branch=win ";
  const auto last = [&](const std::string& name, const std::string& keys) {
    run_ok(train_on(folder.file(name), "cpu", more + keys));
    return heartbeats(folder.file(name), 0, "step_end").back();
  };
  const Json kept = last("kept", "");
  REQUIRE(kept["fp8_flushed"].size() == Fp8Role::count);
  for (const char* role : {"qkv_x", "qkv_dy", "out_proj_x", "out_proj_dy", "mlp_in_x", "mlp_in_dy", "mlp_out_x",
                           "mlp_out_dy", "weight_rows", "weight_columns"}) {
    INFO(role);
    const double flushed = kept["fp8_flushed"][role];
    CHECK(flushed == Approx(role == std::string("qkv_dy") ? kZeros : 0.0).margin(0.001));
    CHECK(kept["fp8_saturated"][role] == 0);
  }
  const std::vector<std::string> rows = lines(folder.file("kept/fp8.csv"));
  REQUIRE(rows.size() == 1 + 2 * Fp8Role::count);
  CHECK(rows[0] == "step,role,flushed,saturated");
  CHECK(rows[rows.size() - 9] == fmt::format("4,qkv_dy,{:.3e},0.000e+00", kept["fp8_flushed"]["qkv_dy"].get<double>()));
  CHECK_FALSE(last("without", "--set log.stats=false ").contains("fp8_flushed"));
  CHECK_FALSE(std::filesystem::exists(folder.file("without/fp8.csv")));
  CHECK(same_file(folder.file("without") + kWeights, folder.file("kept") + kWeights));
}

TEST_CASE("fp8: several ranks count the casts of all", "[fp8][stats][dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  // A first token's query has no gradient, and the ranks' rows have first tokens in other places.
  std::string text;
  for (size_t i = 0; i < 100; ++i) text += "{\"text\": \"" + std::string(3 + i * i % 29, 'x') + "\"}\n";
  write_text(folder.file("documents.jsonl"), text);
  const auto flushed = [&](int ranks, int micro_steps) {
    const std::string out = folder.file(fmt::format("{}", ranks));
    const Outcome outcome = run_ranks(
        ranks, train_args(out, kFp8 + fmt::format("--set train.steps=1 --set nsa.force_branch=win --set data.kind=text "
                                                  "--set data.paths={} --set train.accumulate_grad_batches={} ",
                                                  folder.file("documents.jsonl"), micro_steps)));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return heartbeats(out, 0, "step_end").back()["fp8_flushed"];
  };
  const Json one = flushed(1, 2), two = flushed(2, 1);
  CHECK(one["qkv_dy"] > 0.5);
  CHECK(one == two);
}

TEST_CASE("fp8: grads --dtype fp8 counts its products by kernel", "[fp8]") {
  const TemporaryFolder folder;
  const std::string tiny = TRIAD_SOURCE_DIR "/configs/tiny.json";
  run_ok("init " + tiny + " --out " + folder.file("init"));
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i <= 48; ++i) tokens.push_back((i * i + 5) % 256);
  write_shard(folder.file("tokens.bin"), tokens);
  const auto grads = [&](const std::string& dtype, int products = 0) {
    const std::string out = folder.file("grads.safetensors");
    const Outcome outcome =
        run_program("grads --device cpu --batch 1 --seq 48 --checkpoint " + folder.file("init") + " --tokens " +
                    folder.file("tokens.bin") + " --dtype " + dtype + " --out " + out);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(has(outcome.output, fmt::format("matmul_fp8: cpu {} times", products)) == (products > 0));
    return tensors(out).at("grad/blocks.0.mlp.fc1.weight");
  };
  const std::vector<float> bf16 = grads("bf16"), fp8 = grads("fp8", 24);
  CHECK(bf16 != fp8);
  CHECK(bf16.size() == fp8.size());
}

TEST_CASE("fp8: dist.zero 0 to 3 give the same bits", "[fp8][dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const auto train = [&](int zero, int micro_steps) {
    const std::string out = folder.file(fmt::format("{}_{}", zero, micro_steps));
    const std::string keys = fmt::format(
        "--set model.dim=128 --set dist.bucket_mb=0.1 --set dist.zero={} --set train.accumulate_grad_batches={} ", zero,
        micro_steps);
    const Outcome outcome = run_ranks(2, train_args(out, kFp8 + keys));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return tensors(tensors_path(out));
  };
  const auto one = train(0, 1), two = train(0, 2);
  for (const int zero : {1, 2, 3}) {
    INFO(zero);
    CHECK(train(zero, 1) == one);
  }
  CHECK(train(1, 2) == two);
  CHECK(train(2, 2) == train(3, 2));
}

TEST_CASE("fp8: ranks that share sequences give one rank's logits and gradients, as exactly as without fp8",
          "[fp8][dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  run_ok(train_on(folder.file("run"), "cpu", "--set train.steps=2 --set train.lr=0.02 --set train.warmup_steps=0 "));
  constexpr int kBatch = 2, kSeq = 50;  // two ranks do not share 50 tokens in equal parts with whole blocks
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < kBatch * (kSeq + 1); ++i) tokens.push_back((i * i + 3 * i + i / 7 + 5) % 256);
  write_shard(folder.file("tokens.bin"), tokens);
  struct Distance {
    double logits = 0, grads = 0;
  };
  // Two ranks' distance to one.
  const auto distance = [&](const std::string& dtype) {
    const auto grads = [&](int ranks) {
      const std::string out = folder.file(fmt::format("{}{}.safetensors", dtype.substr(0, 3), ranks));
      const std::string args = fmt::format(
          "grads --device cpu --dtype {} --checkpoint {} --tokens {} --batch {} --seq {} --context {} --out {}", dtype,
          folder.file("run"), folder.file("tokens.bin"), kBatch, kSeq, ranks, out);
      const Outcome outcome = ranks == 1 ? run_program(args) : run_ranks(ranks, args);
      INFO(outcome.output);
      REQUIRE(outcome.exit_code == 0);
      CHECK(has(outcome.output, "matmul_fp8: cpu 24 times") == (dtype != "bf16"));
      return tensors(out);
    };
    const auto one = grads(1), two = grads(2);
    Distance error, size;
    for (const auto& [name, values] : one) {
      if (name != "logits" && !name.starts_with("grad/")) continue;
      for (size_t i = 0; i < values.size(); ++i) {
        const double off = std::pow(double{values[i]} - two.at(name).at(i), 2), square = std::pow(values[i], 2);
        (name == "logits" ? error.logits : error.grads) += off;
        (name == "logits" ? size.logits : size.grads) += square;
      }
    }
    return Distance{std::sqrt(error.logits / size.logits), std::sqrt(error.grads / size.grads)};
  };
  const Distance bf16 = distance("bf16"), fp8 = distance("fp8");
  CHECK(fp8.logits <= 2 * bf16.logits);  // both 0 where a matrix product's rows do not depend on their number
  CHECK(fp8.grads <= 2 * bf16.grads);
}

TEST_CASE("fp8: with activations in fp32, the first step's gradients of ranks that share sequences are one rank's",
          "[fp8][dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  // A last bit may decide how an element of e4m3 is rounded, by up to a sixteenth of it. Later steps may differ for
  // that in anything, the first one in products of such elements alone: matrices have a bound for all their elements
  // together.
  const auto moments = [&](int ranks) {
    const std::string out = folder.file(fmt::format("{}", ranks));
    const Outcome outcome =
        run_ranks(ranks, train_args(out, kFp8 + fmt::format("--set train.steps=1 --set train.seq_len=64 "
                                                            "--set dist.context={} ",
                                                            ranks)));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return tensors(out + "/checkpoints/step_1/optimizer.safetensors");
  };
  const auto one = moments(1), two = moments(2);
  for (const auto& [name, values] : one) {
    if (!name.starts_with("exp_avg/")) continue;
    INFO(name);
    double largest = 0, errors = 0, squares = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const double error = std::abs(double{values[i]} - two.at(name)[i]);
      largest = std::max(largest, error), errors += error * error, squares += std::pow(values[i], 2);
    }
    const bool linear = name.ends_with("_proj.weight") || name.find(".mlp.") != std::string::npos;
    if (linear)
      CHECK(std::sqrt(errors / squares) <= 0.005);
    else
      CHECK(largest <= 2e-5 * std::sqrt(squares / static_cast<double>(values.size())));
  }
}

TEST_CASE("fp8: a run's peak memory is that of bf16", "[fp8]") {
  struct Size {
    const char *config, *keys;
  };
  for (const Size& s :
       std::initializer_list<Size>{{"llama_1b", "--set train.micro_batch_size=4 --set runtime.recompute=none"},
                                   {"llama_1b", "--set train.micro_batch_size=4 --set runtime.recompute=block"},
                                   {"llama_8b", "--set runtime.recompute=block"},
                                   // more columns than one pass over an activation casts
                                   {"llama_8b", "--set runtime.recompute=block --set model.mlp_hidden=28672"}}) {
    INFO(s.config << " " << s.keys);
    const auto peak = [&](const std::string& more) {
      const std::string args =
          fmt::format("plan {}/configs/{}.json --card h200 --json {} {}", TRIAD_SOURCE_DIR, s.config, s.keys, more);
      return parse_json(run_ok(args), "plan")["peak_bytes"].get<int64_t>();
    };
    const int64_t without = peak("");
    CHECK(peak(kFp8) <= without + 4096);  // the counts of casts
  }
}

TEST_CASE("fp8: keys that do not go together are errors", "[fp8]") {
  const auto load = [](std::vector<std::string> sets) {
    return [sets] { load_config(TRIAD_SOURCE_DIR "/configs/tiny.json", sets); };
  };
  check_error(load({"runtime.matmul_dtype=fp16"}), {"runtime.matmul_dtype", "fp16", "fp8"});
  check_error(load({"runtime.fp8_exclude=0:1"}), {"runtime.fp8_exclude", "runtime.matmul_dtype fp8"});
  for (const std::string wrong : {"0:3", "1", "0:1=mlp", "0:1,0:1"})
    check_error(load({"runtime.matmul_dtype=fp8", "runtime.fp8_exclude=" + wrong}), {"runtime.fp8_exclude", wrong});
  check_error(load({"runtime.matmul_dtype=fp8", "runtime.kernels=reference"}), {"runtime.matmul_dtype", "reference"});
}
