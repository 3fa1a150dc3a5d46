// Settings that fit into memory (train/fit/fit.h), and the step cost model that chooses among them.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "engine/with_cuda.h"
#include "io/json_config.h"
#include "model/params.h"
#include "tests/support/dist_run.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/fit/fit.h"
#include "train/fit/step_cost.h"

using namespace triad;
using namespace triad::test;

namespace {

const std::string kM7c = TRIAD_SOURCE_DIR "/configs/m7c_125m.json", kLlama = TRIAD_SOURCE_DIR "/configs/llama_8b.json";

Config m7c(std::vector<std::string> sets) {
  sets.insert(sets.begin(), {"model.n_layers=3", "train.micro_batch_size=4"});
  return load_config(kM7c, sets).config;
}

// Every runtime.recompute value that is tried, in its normal form.
std::vector<std::string> all_recompute(int64_t layers) {
  std::vector<std::string> all = {"none"};
  for (int64_t k = 1; k <= layers; ++k) {
    for (const char* stage : {"mlp", "attention", "block"}) all.push_back(fmt::format("0:{}={}", k, stage));
    if (k < layers) all.push_back(fmt::format("0:{}=block,{}:{}=mlp", k, k, layers));
  }
  return all;
}

// Plans for a GPU with CUDA, for the CPU without.
const std::string kAuto = " --set runtime.device=auto";

Json plan(const std::string& args) {
  const Outcome outcome = run_program("plan " + args + kAuto + " --json");
  INFO("triad plan " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return parse_json(outcome.standard_output, "plan");
}

}  // namespace

TEST_CASE("fit: bytes that a rank sends, by dist.zero", "[fit]") {
  const auto per_parameter = [](const std::vector<std::string>& sets, bool last, int64_t ranks) {
    const Config config = m7c(sets);
    const auto [within, to_others] = bytes_sent(config, ranks, last);
    const auto parameters = static_cast<double>(count_parameters(config.model));
    return std::pair{within / parameters, to_others / parameters};
  };
  const auto sent = [&](int zero, bool last, int64_t ranks, const std::string& dtype = "fp32") {
    const auto [within, to_others] =
        per_parameter({"dist.zero=" + std::to_string(zero), "dist.grad_dtype=" + dtype}, last, ranks);
    CHECK(to_others == 0);
    return within;
  };
  // 4-byte gradients and 2-byte weights; half of each is another rank's, with four ranks three quarters.
  CHECK(sent(0, true, 2) == Approx(4));
  CHECK(sent(0, false, 2) == 0);
  CHECK(sent(1, true, 2) == Approx(3));
  CHECK(sent(1, false, 2) == 0);
  CHECK(sent(2, true, 2) == Approx(3));
  CHECK(sent(2, false, 2) == Approx(2));
  CHECK(sent(3, true, 2) == Approx(4));
  CHECK(sent(3, false, 2) == Approx(4));
  CHECK(sent(3, false, 4) == Approx(6));
  CHECK(sent(3, true, 4, "bf16") == Approx(4.5));
  for (int zero = 0; zero < 4; ++zero) CHECK(sent(zero, true, 1) == 0);
  // Four replicas with two ranks: each rank sends three quarters of its half of the gradients, twice.
  const auto [within, to_others] = per_parameter({"dist.zero=2", "dist.replicas=4"}, false, 8);
  CHECK(within == Approx(2));
  CHECK(to_others == Approx(3));
  const auto in_bf16 = per_parameter({"dist.zero=2", "dist.replicas=4", "dist.replicas_grad_dtype=bf16"}, false, 8);
  CHECK(in_bf16.first == Approx(2));
  CHECK(in_bf16.second == Approx(1.5));
}

TEST_CASE("fit: the parts of a step's cost", "[fit]") {
  const auto cost = [](std::vector<std::string> sets, int64_t ranks) { return step_cost(m7c(std::move(sets)), ranks); };
  // Compute and recomputation are FLOPs at the card's rate.
  const Config block = m7c({"runtime.recompute=block"});
  const double tokens = static_cast<double>(block.train.tokens_per_step());
  const StepCost block_cost = step_cost(block, 1);
  CHECK(block_cost.compute == Approx(training_flops(block.model, 4, 2048) / tokens / kH200Rates.flops));
  CHECK(block_cost.compute + block_cost.recompute ==
        Approx(training_flops(block.model, 4, 2048, block.recompute) / tokens / kH200Rates.flops));
  CHECK(block_cost.communication == 0);
  CHECK(cost({}, 1).recompute == 0);
  // Recomputing norm and rotation for q and k (18 heads, 64 wide, in bf16) reads and writes them twice in two layers.
  CHECK(cost({"model.qk_norm=true", "runtime.recompute=pointwise"}, 1).recompute ==
        Approx(2.0 * 4 * 2 * 18 * 64 / kH200Rates.memory));
  // Larger micro-batches have less overhead for the same tokens.
  const std::vector<std::string> split = {"train.micro_batch_size=1", "train.accumulate_grad_batches=4"};
  CHECK(cost(split, 1).overhead > 2 * cost({}, 1).overhead);
  CHECK(cost(split, 1).compute == Approx(cost({}, 1).compute));
  // With accumulation dist.zero 2 sends more than 1, and 3 more than 2. Without, 1 and 2 cost the same.
  const auto total = [&](std::vector<std::string> sets, const std::string& zero, int64_t ranks = 8) {
    sets.push_back("dist.zero=" + zero);
    return cost(std::move(sets), ranks).total();
  };
  CHECK(total({}, "1") == total({}, "2"));
  CHECK(total({}, "1") < total({}, "0"));
  CHECK(total(split, "1") < total(split, "2"));
  CHECK(total(split, "2") < total(split, "3"));
  CHECK(total({}, "3", 8) < total({}, "3", 16));  // 16 ranks are on two hosts
  // Shared-sequence exchanges cost their bytes at NVLink's rate, or at the network's beyond a host.
  const auto exchange = [&](const std::string& context, int64_t micro_steps) {
    const Config shared =
        m7c({"dist.context=" + context, "train.accumulate_grad_batches=" + std::to_string(micro_steps)});
    const auto tokens_of_rank = static_cast<double>(shared.train.tokens_per_step()) / std::stod(context);
    const StepCost none = step_cost(shared, 16), some = step_cost(shared, 16, {}, /*exchanged=*/4'000'000);
    CHECK(some.total() - none.total() == Approx(some.exchange));
    return some.exchange * tokens_of_rank;
  };
  CHECK(exchange("8", 1) == Approx(4e6 / kH200Rates.host));
  CHECK(exchange("16", 1) == Approx(4e6 / kH200Rates.network));
  // If exchanges overlap, a tenth shows, or what exceeds half the computation.
  const StepCost overlap = {.compute = 3, .recompute = 1, .exchange = 1, .overhead = 1};
  CHECK(overlap.exchange_shown() == Approx(0.1));
  CHECK(StepCost{.compute = 3, .recompute = 1, .exchange = 5, .overhead = 1}.exchange_shown() == Approx(3));
  CHECK(exchange("8", 3) == Approx(3 * 4e6 / kH200Rates.host));
  // More recomputation costs more, though it hides more communication.
  for (const char* zero : {"0", "3"})
    for (const int64_t ranks : {2, 64}) {
      double last = 0;
      for (const char* recompute : {"none", "0:2=mlp", "0:3=mlp", "0:3=block"}) {
        const double now = total({std::string("runtime.recompute=") + recompute}, zero, ranks);
        CHECK(now > last);
        last = now;
      }
    }
}

TEST_CASE("fit: the recomputation has the fewest FLOPs of all that fit", "[fit]") {
  const auto config = [](const std::string& recompute) {
    return m7c({"model.n_layers=8", "runtime.recompute=" + recompute});
  };
  const auto flops = [&](const std::string& recompute) {
    const Config c = config(recompute);
    return training_flops(c.model, 4, 2048, c.recompute);
  };
  std::vector<std::pair<int64_t, double>> all;  // peak bytes and FLOPs
  for (const std::string& recompute : all_recompute(8))
    all.emplace_back(plan_memory(config(recompute), Device::cuda()).peak_bytes(), flops(recompute));
  std::sort(all.begin(), all.end());
  double fewest = std::numeric_limits<double>::infinity();
  for (const auto& [limit, tried_flops] : all) {
    fewest = std::min(fewest, tried_flops);
    const std::optional<RecomputeFit> fit = fit_recompute(config("none"), Device::cuda(), limit);
    INFO("limit " << limit);
    REQUIRE(fit);
    INFO(fit->recompute);
    CHECK(fit->plan.peak_bytes() <= limit);
    CHECK(flops(fit->recompute) == Approx(fewest));
  }
  CHECK(!fit_recompute(config("none"), Device::cuda(), all[0].first - 1));
}

TEST_CASE("fit: with norms of q and k, these are recomputed before any matrix product", "[fit]") {
  const auto config = [](const std::string& recompute) {
    return m7c({"model.n_layers=8", "model.qk_norm=true", "runtime.recompute=" + recompute});
  };
  const std::optional<RecomputeFit> fit =
      fit_recompute(config("none"), Device::cuda(), plan_memory(config("0:3=pointwise"), Device::cuda()).peak_bytes());
  REQUIRE(fit);
  CHECK(fit->recompute == "0:3=pointwise");
  CHECK(fit->replayed_share == 0);
}

TEST_CASE("fit: the settings are the cheapest of all that fit", "[fit]") {
  struct Tried {
    std::string recompute;
    int64_t zero, batch, bytes;
    double cost;
  };
  const std::unique_ptr<Comm> ranks = make_planned_comm(2);
  std::vector<Tried> all;
  for (const int64_t zero : {0, 1, 2, 3})
    for (const int64_t batch : {1, 2, 4})
      for (const std::string& recompute : all_recompute(3)) {
        const Config config = m7c({"dist.zero=" + std::to_string(zero), "runtime.recompute=" + recompute,
                                   "train.micro_batch_size=" + std::to_string(batch),
                                   "train.accumulate_grad_batches=" + std::to_string(4 / batch)});
        all.push_back({recompute, zero, batch, plan_memory(config, Device::cuda(), ranks.get()).peak_bytes(),
                       step_cost(config, 2).total()});
      }
  std::vector<int64_t> limits;
  for (const Tried& tried : all) limits.push_back(tried.bytes);
  std::sort(limits.begin(), limits.end());
  constexpr double kMost = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < limits.size(); i += 5) {
    const int64_t limit = limits[i];
    double cost = kMost;
    for (const Tried& tried : all)
      if (tried.bytes <= limit) cost = std::min(cost, tried.cost);
    INFO("limit " << limit);
    const std::optional<Settings> best = fit_settings(m7c({}), Device::cuda(), limit, ranks.get());
    REQUIRE(best);
    INFO(arguments_of(*best, 2));
    CHECK(best->cost.total() == Approx(cost).epsilon(1e-12));
    CHECK(best->plan.peak_bytes() <= limit);
    CHECK(best->micro_batch_size * best->accumulate_grad_batches == 4);
    // With equal costs the smallest dist.zero wins
    for (const Tried& tried : all)
      if (tried.bytes <= limit && tried.cost == best->cost.total()) CHECK(tried.zero >= best->zero);
  }
  CHECK(!fit_settings(m7c({}), Device::cuda(), limits[0] - 1, ranks.get()));
}

TEST_CASE("fit: a plan of many micro-steps is that of three", "[fit]") {
  const std::unique_ptr<Comm> ranks = make_planned_comm(2);
  const auto bytes = [&](const std::string& zero, const std::string& micro_steps) {
    const Config config = m7c({"dist.zero=" + zero, "train.accumulate_grad_batches=" + micro_steps});
    return plan_memory(config, Device::cuda(), ranks.get()).peak_bytes();
  };
  for (const char* zero : {"0", "1", "2", "3"}) CHECK(bytes(zero, "3") == bytes(zero, "1048576"));
}

TEST_CASE("fit: advice for a run that does not fit", "[fit]") {
  const std::unique_ptr<Comm> ranks = make_planned_comm(8);
  const auto bytes = [&](const std::vector<std::string>& sets) {
    return plan_memory(m7c(sets), Device::cuda(), ranks.get()).peak_bytes();
  };
  const auto advice = [&](const std::vector<std::string>& sets, int64_t limit, bool several = true) {
    return fit_advice(m7c(sets), Device::cuda(), limit, several ? ranks.get() : nullptr);
  };
  const std::string sharded = advice({}, bytes({"dist.zero=1"}));
  INFO(sharded);
  CHECK(has(sharded, "this fits: "));
  CHECK(has(sharded, "dist.zero 1 ("));
  CHECK(has(advice({}, bytes({}) - 1), "this fits: runtime.recompute \""));
  CHECK(!has(advice({"dist.zero=3"}, bytes({"dist.zero=3"}) - 1), "dist.zero"));
  CHECK(!has(advice({}, bytes({"dist.zero=1"}), false), "dist.zero"));
  // No single key suffices.
  const int64_t least = bytes({"dist.zero=3", "runtime.recompute=block", "train.micro_batch_size=1"});
  const std::string together = advice({}, least);
  INFO(together);
  CHECK(has(together,
            "this fits: --set dist.zero=3 --set runtime.recompute=0:3=block --set train.micro_batch_size=1 "
            "--set train.accumulate_grad_batches=4 ("));
  CHECK(has(advice({}, least / 2), "not even one sequence fits"));
}

TEST_CASE("fit: triad plan --fit recommends settings that can be pasted", "[fit]") {
  const std::string config = kLlama + " --set train.micro_batch_size=4";
  for (const char* more : {" --ranks 64", " --ranks 8", " --ranks 8 --set model.attention=dense"}) {
    const Json fit = plan(config + more + " --fit --memory-gb 80")["fit"], best = fit["recommended"];
    INFO(more << " " << best.dump());
    const std::string arguments = best["arguments"];
    CHECK(has(arguments, "--set dist.zero=" + std::to_string(best["zero"].get<int>())));
    CHECK(best["peak_bytes"].get<int64_t>() <= 80'000'000'000);
    CHECK(best["micro_batch_size"].get<int>() * best["accumulate_grad_batches"].get<int>() == 4);
    const Json pasted = plan(config + more + " " + arguments);
    CHECK(pasted["peak_bytes"] == best["peak_bytes"]);
    CHECK(pasted["tokens_per_step"] == plan(config + more)["tokens_per_step"]);
  }
  // One rank: no dist.zero. All fits, so nothing is recomputed or split.
  const Json alone = plan(kM7c + " --fit --memory-gb 100")["fit"]["recommended"];
  CHECK(alone["arguments"] ==
        "--set runtime.recompute=none --set train.micro_batch_size=16 --set train.accumulate_grad_batches=1");
  const Outcome text = run_program("plan " + kM7c + kAuto + " --fit --memory-gb 8 --ranks 2");
  INFO(text.output);
  CHECK(text.exit_code == 0);
  CHECK(has(text.output, "recommended, with the same tokens in a step: "));
  CHECK(has(text.output, "\n  --set dist.zero="));
}

TEST_CASE("fit: if nothing fits, triad plan names the least need and what needs less", "[fit]") {
  const Outcome outcome = run_program("plan " + kLlama + kAuto + " --fit --memory-gb 24 --ranks 2");
  INFO(outcome.output);
  CHECK(outcome.exit_code == 1);
  const auto need = [&](const std::string& args) {
    const double bytes = plan(kLlama + " --set runtime.recompute=block " + args)["peak_bytes"];
    return fmt::format("{:.3f} GB", bytes / 1e9);
  };
  const std::string moments = "--set train.moments_dtype=bf16 ", grads = "--set train.grads_dtype=bf16 ",
                    master = "--set train.master_dtype=none ",
                    small = "; train.moments_dtype=bf16 train.grads_dtype=bf16 train.master_dtype=none";
  std::vector<std::string> parts = {
      "nothing fits in 24.000 GB: the least that this config needs on each of 2 ranks is ",
      need("--ranks 2") + ", with runtime.recompute=block train.micro_batch_size=1",
      "dist.zero=3",
      "train.moments_dtype=bf16: " + need("--ranks 2 " + moments),
      "train.grads_dtype=bf16: " + need("--ranks 2 " + grads),
      "train.master_dtype=none: " + need("--ranks 2 " + master),
      small + ": " + need("--ranks 2 " + moments + grads + master),
      "16 ranks with dist.zero=3: " + need("--ranks 16") + ", which fits"};
  if (backend::built_with_cuda()) {
    parts.push_back("runtime.offload=optimizer: " + need("--ranks 2 --set runtime.offload=optimizer"));
    parts.push_back(small + " runtime.offload=optimizer: " +
                    need("--ranks 2 --set runtime.offload=optimizer " + moments + grads + master));
  } else {
    CHECK(!has(outcome.output, "runtime.offload"));  // the state is on the host anyway
  }
  for (const std::string& part : parts) {
    INFO(part);
    CHECK(has(outcome.output, part));
  }
  // One rank stores masters' and weights' bits twice, ranks with dist.zero 3 do not.
  CHECK(!has(outcome.output, "train.master_dtype=split"));
  CHECK(has(run_program("plan " + kM7c + kAuto + " --fit --memory-gb 1").output, "train.master_dtype=split: "));
  const Outcome fp32 = run_program("plan " + kM7c + kAuto + " --fit --memory-gb 1 --set runtime.precision=fp32");
  INFO(fp32.output);
  CHECK(fp32.exit_code == 1);
  CHECK(has(fp32.output, "train.moments_dtype=bf16: "));
  CHECK(!has(fp32.output, "train.grads_dtype"));
  CHECK(!has(fp32.output, "train.master_dtype"));
  CHECK(run_program("plan " + kTiny + " --fit --memory-gb -1").exit_code == 2);
  CHECK(run_program("plan " + kTiny + " --memory-gb 8").exit_code == 2);  // --fit is missing
}
