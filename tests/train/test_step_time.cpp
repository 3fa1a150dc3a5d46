// Plans for a card (train/fit/cards.h): memory and the time of a step, compared with measured steps.
#include <fmt/ranges.h>

#include <cmath>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/fit/step_time.h"
#include "train/monitor/banner.h"
#include "train/run/memory_plan.h"

using namespace triad;
using namespace triad::test;

namespace {

// A measured run. Unless it says otherwise, it is a row of tests/baselines/rows.jsonl.
struct Measured {
  const char *card, *config;
  std::vector<std::string> sets;
  int64_t ranks;
  double tokens_per_s;  // 0: not measured
  double gb;            // planned memory as the run printed it; 0: not recorded, or of a commit that needed more
  double joules;        // joules of a step on each card; 0: not recorded
  // Whether step_time.cpp's constants were chosen by this row. They were not refined for any other one.
  bool fitted = false;
};

const std::vector<Measured>& measured_rows() {
  const std::vector<std::string> k4x8192 = {"train.seq_len=8192", "train.micro_batch_size=4"},
                                 k1x65536 = {"train.seq_len=65536", "train.micro_batch_size=1"};
  const auto with = [](std::vector<std::string> sets, const std::vector<std::string>& more) {
    sets.insert(sets.end(), more.begin(), more.end());
    return sets;
  };
  const std::vector<std::string> none = {"runtime.recompute=none"}, split = {"train.master_dtype=split"},
                                 dense = {"model.attention=dense"}, general = {"runtime.kernels=general"},
                                 fp8 = {"runtime.matmul_dtype=fp8", "train.master_dtype=split"};
  const std::vector<std::string> b1 = with(k4x8192, none), b8 = {"model.n_layers=8", "train.micro_batch_size=2",
                                                                 "runtime.recompute=none", "dist.zero=0"};
  static const std::vector<Measured> kRows = {
      {"h200", "m7c_125m", {}, 1, 520683, 0, 0, true},
      {"h200", "m7c_125m", dense, 1, 614250, 0, 0, true},
      {"h200", "m7c_125m", k1x65536, 1, 351547, 0, 0, true},
      {"h100", "llama_1b", with(b1, split), 1, 62056, 52.214, 370.0, true},
      {"h100", "m7c_125m", general, 1, 405559, 9.806, 55.1, true},
      // these two measured on 2026-11-29; in no kept row
      {"h200", "llama_1b", with(b1, fp8), 1, 77236, 52.214, 285.7, true},
      {"h200", "llama_8b", with(b8, fp8), 1, 48628, 57.632, 229.3, true},
      {"h200", "m7c_125m", k4x8192, 1, 464681, 0, 0},
      {"h200", "m7c_125m", {"train.micro_batch_size=1"}, 1, 271827, 0, 0},
      {"h200", "m7c_1m", with(k1x65536, none), 1, 416775, 0, 0},
      // measured beside fp8 on 2026-11-29; in no kept row
      {"h200", "llama_1b", with(k4x8192, {"runtime.recompute=block"}), 1, 52083, 26.8, 446.6},
      // tests/baselines/findings/select.md
      {"h200", "m7c_1m_index", k1x65536, 1, 370401, 4.070, 0, true},
      {"h200", "m7c_1m_index", {"train.seq_len=262144"}, 1, 258198, 14.608, 0},
      {"h200", "m7c_1m_index", {}, 1, 163848, 63.662, 4134},
      {"h200", "m7c_1m_index", with(k1x65536, {"nsa.select_every=16"}), 1, 415650, 4.070, 0},
      {"h200", "m7c_1m_index", {"train.seq_len=262144", "nsa.select_every=16"}, 1, 319216, 14.608, 0},
      {"h100", "m7c_125m", {}, 1, 486145, 9.806, 48.1},
      {"h100", "m7c_125m", k4x8192, 1, 440706, 9.807, 0},
      {"h100", "m7c_125m", k1x65536, 1, 338221, 17.011, 133.4},
      {"h100", "m7c_125m", with(k1x65536, general), 1, 255494, 17.004, 175.5},
      {"h100", "llama_1b", with(b1, dense), 1, 58785, 46.733, 0},
      {"h100", "llama_1b", with(k1x65536, {"runtime.recompute=block"}), 1, 41089, 30.206, 0},
      {"h100", "llama_1b", with(with(k4x8192, split), {"runtime.recompute=0:2=mlp"}), 1, 60944, 51.140, 0},
      {"h100", "llama_8b", b8, 1, 35379, 63.121, 0},
      {"h100", "llama_8b", with(b8, dense), 1, 36305, 57.924, 0},
      {"h100", "llama_8b", {"train.micro_batch_size=1", "dist.zero=3"}, 2, 15060, 77.34, 0},
      {"h100", "m7c_125m", {"dist.zero=1"}, 2, 940410, 0, 0},
      {"h100", "m7c_1m", with(k1x65536, {"runtime.recompute=block"}), 1, 316965, 0, 0},
      // memory as a build with CUDA plans it
      {"h100", "m7c_1m", {"runtime.recompute=block"}, 1, 47382, 66.436, 0},
      {"h200", "m7c_1m", {"dist.context=2"}, 2, 0, 43.232, 0},
      {"h200", "m7c_1m", {"dist.context=8"}, 8, 0, 14.432, 0},
      {"h200", "m7c_1m_index", {"dist.context=8"}, 8, 0, 13.746, 0},
      {"h200", "llama_8b_1m", {}, 8, 0, 133.078, 0}};
  return kRows;
}

Config measured_config(const Measured& row) {
  return load_config(fmt::format("{}/configs/{}.json", TRIAD_SOURCE_DIR, row.config), row.sets).config;
}

std::string text_of(const Measured& row) {
  return fmt::format("{} on {} {}: {}", row.config, row.ranks, row.card, fmt::join(row.sets, " "));
}

RunTime time_of(const Measured& row) {
  const Config config = measured_config(row);
  return run_time(config, card_of(row.card), row.ranks, 0, {DocumentMix{}}).value();
}

}  // namespace

TEST_CASE("cards: estimates are within 15% of measured steps, most of which they are not fitted to", "[fit]") {
  for (const Measured& row : measured_rows()) {
    if (row.tokens_per_s == 0) continue;
    const RunTime time = time_of(row);
    INFO(text_of(row) << "\n" << run_time_text(time, card_of(row.card), /*in_parts=*/true));
    CHECK(std::abs(time.tokens_per_s() / row.tokens_per_s - 1) < 0.15);
    const double step_joules = time.last_step.total() * card_of(row.card).watts;
    if (row.joules > 0) CHECK(std::abs(step_joules / row.joules - 1) < 0.15);
  }
}

TEST_CASE("cards: planned memory is within 3% of the runs', in a build without CUDA too", "[fit]") {
  for (const Measured& row : measured_rows()) {
    if (row.gb == 0) continue;
    const std::unique_ptr<Comm> ranks = make_planned_comm(static_cast<int>(row.ranks));
    const MemoryPlan plan = plan_memory(measured_config(row), PlannedDevice(card_of(row.card)), ranks.get());
    const double gb = static_cast<double>(plan.peak_bytes()) * 1e-9;
    INFO(text_of(row) << ": " << gb << " GB planned, " << row.gb << " expected");
    CHECK(std::abs(gb / row.gb - 1) < 0.03);
  }
}

TEST_CASE("cards: a slower card takes longer, and one that nothing ran on says so", "[fit]") {
  const auto estimate = [](const char* word, const std::vector<std::string>& sets = {}) {
    return time_of({word, "m7c_125m", sets, 1, 0, 0, 0});
  };
  CHECK(estimate("h100").seconds > estimate("h200").seconds);
  CHECK(estimate("a100").seconds > estimate("h100").seconds);
  CHECK(estimate("4090").seconds > estimate("a100").seconds);
  CHECK(has(run_time_text(estimate("b200"), card_of("b200"), false), "data sheet"));
  CHECK(has(run_time_text(estimate("h100"), card_of("h100"), false), "measured steps on H100s"));
  // Twice the steps take twice as long; steps that are done are not counted.
  const Config config = measured_config({"h100", "m7c_125m", {"train.steps=400"}, 1, 0, 0, 0});
  const auto seconds = [&](int64_t done) {
    return run_time(config, card_of("h100"), 1, done, {DocumentMix{}})->seconds;
  };
  CHECK(seconds(0) == Approx(2 * estimate("h100").seconds));
  CHECK(seconds(300) == Approx(seconds(0) / 4));
  // fp32 has no measured steps.
  CHECK(!run_time(measured_config({"h100", "m7c_125m", {"runtime.precision=fp32"}, 1, 0, 0, 0}), card_of("h100"), 1, 0,
                  {DocumentMix{}}));
  CHECK(card_named("NVIDIA H100 80GB HBM3")->word == std::string("h100"));
  CHECK(!card_named("Tesla V100-SXM2-32GB"));
  CHECK(estimate_error_text(50000, 49000) == "estimated 50,000 tokens/s, measured 49,000: 2.0% slower");
}

TEST_CASE("cards: triad plan --card, with --fit and in JSON", "[fit]") {
  const std::string m7c = "plan " TRIAD_SOURCE_DIR "/configs/m7c_125m.json ";
  const Outcome text = run_program(m7c + "--card h200");
  INFO(text.output);
  CHECK(text.exit_code == 0);
  CHECK(has(text.output, "H200: 138.8 of 148.6 GB are left"));
  CHECK(has(text.output, " tokens/s, "));
  const Outcome json = run_program(m7c + "--card 4090 --fit --json");
  INFO(json.output);
  REQUIRE(json.exit_code == 0);
  const Json plan = parse_json(json.standard_output, "plan");
  CHECK(plan["card"]["measured"] == false);
  CHECK(plan["card"]["fits"] == true);
  CHECK(plan["fit"]["memory_bytes"] == card_of("4090").memory_bytes - kCardReserve);
  CHECK(plan["fit"]["recommended"]["peak_bytes"] <= plan["fit"]["memory_bytes"]);
  const Outcome large = run_program("plan " TRIAD_SOURCE_DIR "/configs/llama_8b.json --card 4090");
  CHECK(has(large.output, "it does not fit"));
  const Outcome unknown = run_program(m7c + "--card v100");
  CHECK(unknown.exit_code == 2);
  CHECK(has(unknown.output, "--card v100: there are h100, h200, a100, 4090, b200"));
}
