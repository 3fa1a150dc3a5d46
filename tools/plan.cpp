// triad plan: predicts a config's parameters, FLOPs and memory in a run; with --fit, it finds settings that fit in
// memory; with --card, it plans for a card that need not be here, and estimates the run's time and energy.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "engine/check.h"
#include "engine/comm/comm.h"
#include "engine/process/counted.h"
#include "engine/units.h"
#include "engine/with_cuda.h"
#include "io/json_config.h"
#include "kernels/ops/matmul.h"
#include "model/flops.h"
#include "model/params.h"
#include "tools/options.h"
#include "tools/verbs.h"
#include "train/config/load_config.h"
#include "train/config/schedule.h"
#include "train/fit/fit.h"
#include "train/fit/planned_exchanges.h"
#include "train/fit/step_time.h"
#include "train/monitor/banner.h"
#include "train/monitor/pace.h"
#include "train/run/data_source.h"
#include "train/run/memory_plan.h"

namespace triad {

namespace {

constexpr double kGB = 1e9;
constexpr const char* kSomeCard = "h200";
// Why FLOPs are only a bound if the config alone says how many documents a row may have.
constexpr const char* kWholeRows =
    " (data.max_documents is set, so the data is not opened, and each row counts as one document)";

struct PlanOptions {
  std::string config, card;
  std::vector<std::string> sets;
  bool fit = false, json = false;
  double memory_gb = 0;
  int ranks = 1;
};

// The device to plan for. No GPU is needed: `auto` means a GPU if the program was built with CUDA. Without CUDA the
// build lacks the kernels' host code, which knows their scratch memory.
Device planned_device(DeviceChoice choice) {
  if (choice == DeviceChoice::cuda && !backend::built_with_cuda())
    fail_usage(
        "runtime.device is cuda, but this build has no CUDA: --card {} plans for that card, with its kernels' own "
        "temporaries left out (a build with CUDA counts them; it needs nvcc, but no GPU), and --set runtime.device=cpu "
        "for the CPU",
        kSomeCard);
  return choice == DeviceChoice::cpu || !backend::built_with_cuda() ? Device::cpu() : Device::cuda();
}

// The memory limit for --fit in bytes: --memory-gb, or the card's, or the device's free memory.
int64_t memory_of(const PlanOptions& o, const Device& device) {
  if (o.memory_gb > 0) return static_cast<int64_t>(o.memory_gb * kGB);
  if (!o.card.empty()) return card_of(o.card).memory_bytes - kCardReserve;
  if (device.is_cuda() && backend::cuda_device_count() == 0)
    fail_usage("--fit needs --memory-gb: there is no GPU here whose free memory could be used ({})",
               backend::why_no_cuda());
  return backend::info(device).free_bytes;
}

double gb(int64_t bytes) { return static_cast<double>(bytes) / kGB; }

// What a step's token costs.
struct TokenFlops {
  double all = 0, replayed = 0;
};
TokenFlops token_flops(const Config& config, const TrainStage& stage, const DocumentMix& attended) {
  Config keeps_all = config;
  keeps_all.recompute = {};
  const double ranks_of_sequence = static_cast<double>(config.dist.context),
               tokens = static_cast<double>(in_stage(config, stage).train.tokens_per_step()) / ranks_of_sequence;
  const double all = stage_flops(config, stage, attended) / tokens;
  return {all, all - stage_flops(keeps_all, stage, attended) / tokens};
}

// Returns train.stages as JSON, with what each needs if it is the only one. Without --json, also prints them as text.
Json describe_stages(const PlanOptions& o, const Config& config, const PlannedDevice& device, Comm* ranks,
                     const PlannedDocuments& documents) {
  Json out = Json::array();
  for (const TrainStage& stage : stages_of(config.train)) {
    Config alone = config;
    alone.train.stages = {config.train.stages[stage.index]};
    const Config steps = in_stage(config, stage);
    const int64_t peak = plan_memory(alone, device, ranks, documents.most).peak_bytes();
    const int64_t tokens = steps.tokens_per_step(o.ranks);
    const double flops = token_flops(config, stage, documents.attended[stage.index]).all;
    out.push_back({{"steps", stage.steps()},
                   {"seq_len", stage.seq_len},
                   {"micro_batch_size", stage.micro_batch_size},
                   {"attention", stage.attention == StageAttention::configured ? word_of(config.model.attention)
                                                                               : word_of(stage.attention)},
                   {"tokens_per_step", tokens},
                   {"flops_per_token", flops},
                   {"peak_bytes", peak}});
    if (!o.json)
      fmt::print("{}: {} a step; {}{:.1f} million FLOPs per token; alone it needs {:.3f} GB\n",
                 stage_text(config, stage), counted(tokens, "token"), documents.known ? "" : "at most ", flops * 1e-6,
                 gb(peak));
  }
  return out;
}

// Returns the prediction as JSON. Without --json, also prints it as text. With train.stages, a step is one in the last
// stage.
Json describe_plan(const PlanOptions& o, const Config& run, const PlannedDevice& device, const MemoryPlan& plan,
                   const PlannedDocuments& documents) {
  const TrainStage last = stages_of(run.train).back();
  const Config config = in_stage(run, last);
  const auto [flops, replayed] = token_flops(run, last, documents.attended.back());
  const int64_t trained = count_elements(trained_specs(config.model, config.train.lora));
  const Json out = {{"parameters", count_parameters(config.model)},
                    {"trained_parameters", trained},
                    {"tensors", param_specs(config.model).size()},
                    {"nsa_layers", config.model.count_nsa_layers()},
                    {"window_layers", config.model.count_layers(AttentionKind::window)},
                    {"device", device.str()},
                    {"recompute", config.recompute.str()},
                    {"ranks", o.ranks},
                    {"tokens_per_step", config.tokens_per_step(o.ranks)},
                    {"flops_per_token", flops},
                    {"flops_per_token_replayed", replayed},
                    {"flops_are_a_bound", !documents.known},
                    {"scratch_bytes", plan.scratch_bytes},
                    {"workspace_bytes", plan.workspace_bytes},
                    {"peak_bytes", plan.peak_bytes()}};
  if (!o.json)
    fmt::print(
        "parameters: {} in {}{}; {}; a step{}: {}; FLOPs: {}{:.1f} million per token, {:.1f} of them "
        "recomputed{}\n"
        "peak memory on {}{} {:.3f} GB with runtime.recompute {} (without the CUDA context): matrix library "
        "{:.0f} MiB, scratch {:.0f} MiB, {}\n",
        count_parameters(config.model), counted(param_specs(config.model).size(), "tensor"),
        config.train.lora ? fmt::format(", frozen, and {} that are trained (train.lora)", trained) : "",
        config.model.layers_text(), run.train.stages.empty() ? "" : " of the last stage",
        counted(config.tokens_per_step(o.ranks), "token"), documents.known ? "" : "at most ", flops * 1e-6,
        replayed * 1e-6, documents.known ? "" : kWholeRows, device.str(),
        o.ranks > 1 ? fmt::format(", each of {} ranks, without NCCL's own memory,", o.ranks) : "",
        gb(plan.peak_bytes()), config.recompute.str(), static_cast<double>(plan.workspace_bytes) / kMiB,
        static_cast<double>(plan.scratch_bytes) / kMiB, plan.report);
  return out;
}

// Exchanges as in `triad bench step --json`: [{kind, pass, layers, calls, ranks: [{rank, sent, received}]}], bytes per
// step.
Json json_of(const std::vector<PlannedExchange>& exchanges, int64_t micro_steps) {
  Json out = Json::array();
  for (const PlannedExchange& e : exchanges) {
    Json ranks = Json::array();
    for (const PlannedExchange::Bytes& bytes : e.ranks)
      ranks.push_back(
          {{"rank", bytes.rank}, {"sent", bytes.sent * micro_steps}, {"received", bytes.received * micro_steps}});
    out.push_back({{"kind", e.kind},
                   {"pass", e.backward ? "backward" : "forward"},
                   {"layers", e.layers},
                   {"calls", e.calls * micro_steps},
                   {"ranks", ranks}});
  }
  return out;
}

// For ranks that share sequences: models their exchanges and a step's time (with train.stages, in the last stage).
// Returns it as JSON. Without --json, also prints it as text.
Json describe_shared(const PlanOptions& o, const Config& run, const PlannedDevice& device, Comm* ranks,
                     const PlannedDocuments& documents) {
  const TrainStage last = stages_of(run.train).back();
  Config config = in_stage(run, last);
  if (last.attention == StageAttention::dense) config.model.attention = AttentionKind::dense;
  const std::vector<PlannedExchange> exchanges = plan_exchanges(config, device, ranks, documents.most);
  constexpr CardRates kRates = kH200Rates;
  constexpr double kMB = 1e6, kMs = 1e3;
  const TrainConfig& t = config.train;
  const int64_t context = config.dist.context;
  const StepCost cost = step_cost(config, o.ranks, documents.attended.back(), most_bytes(exchanges));
  double layer_bytes[2] = {0, 0};  // bytes in a micro-step's forward and backward
  for (const PlannedExchange& e : exchanges)
    layer_bytes[e.backward] += static_cast<double>(e.most_bytes()) / static_cast<double>(e.layers);
  const auto step_bytes = static_cast<double>(most_bytes(exchanges) * t.accumulate_grad_batches);
  const double rank_tokens = static_cast<double>(t.tokens_per_step()) / static_cast<double>(context),
               step_s = cost.total() * rank_tokens, hidden_s = (cost.exchange - cost.exchange_shown()) * rank_tokens;
  const auto all_tokens = static_cast<double>(config.tokens_per_step(o.ranks));
  if (!o.json)
    fmt::print(
        "a model of H200 cards, not a measurement. Ranks that share a sequence send or receive at most {:.1f} MB a "
        "layer forward and {:.1f} MB backward, and {:.3f} GB a step: {:.1f} ms at NVLink's {:.0f} GB/s, {:.1f} ms at "
        "the network's {:.0f} GB/s\n"
        "of a step, in ms: compute {:.1f}, recomputation {:.1f}, exchanges {:.1f} ({}), gradients and weights {:.1f}, "
        "small kernels and update {:.1f}; in all {:.1f}, {:.0f} tokens/s; {:.1f}, {:.0f} tokens/s, if exchanges "
        "overlap "
        "with half of the computation\n",
        layer_bytes[0] / kMB, layer_bytes[1] / kMB, step_bytes / kGB, step_bytes / kRates.host * kMs, kRates.host / kGB,
        step_bytes / kRates.network * kMs, kRates.network / kGB, cost.compute * rank_tokens * kMs,
        cost.recompute * rank_tokens * kMs, cost.exchange * rank_tokens * kMs,
        context > kRates.host_ranks ? "network" : "NVLink", cost.communication * rank_tokens * kMs,
        cost.overhead * rank_tokens * kMs, step_s * kMs, all_tokens / step_s, (step_s - hidden_s) * kMs,
        all_tokens / (step_s - hidden_s));
  return {{"exchanges", json_of(exchanges, t.accumulate_grad_batches)},
          {"layer_bytes", {{"forward", layer_bytes[0]}, {"backward", layer_bytes[1]}}},
          {"step_bytes", step_bytes},
          {"step_seconds",
           {{"compute", cost.compute * rank_tokens},
            {"recompute", cost.recompute * rank_tokens},
            {"exchange", cost.exchange * rank_tokens},
            {"communication", cost.communication * rank_tokens},
            {"overhead", cost.overhead * rank_tokens}}},
          {"tokens_per_s", all_tokens / step_s},
          {"tokens_per_s_overlapped", all_tokens / (step_s - hidden_s)}};
}

// Bytes that ranks which share sequences exchange in a micro-step of the last stage.
int64_t exchanged_bytes(const Config& run, const PlannedDevice& device, Comm* ranks,
                        const PlannedDocuments& documents) {
  if (run.dist.context == 1) return 0;
  return most_bytes(plan_exchanges(in_stage(run, stages_of(run.train).back()), device, ranks, documents.most));
}

// Whether the plan fits into --card's memory, and the run's time and energy on it, as JSON. Without --json, also prints
// them as text.
Json describe_card(const PlanOptions& o, const Config& config, const PlannedDevice& device, const MemoryPlan& plan,
                   Comm* ranks, const PlannedDocuments& documents) {
  const Card& card = card_of(o.card);
  const int64_t room = card.memory_bytes - kCardReserve, left = room - plan.peak_bytes();
  Json out = {{"word", card.word},
              {"memory_bytes", card.memory_bytes},
              {"reserve_bytes", kCardReserve},
              {"fits", left >= 0},
              {"measured", card.measured}};
  const std::optional<RunTime> time =
      run_time(config, card, o.ranks, 0, documents.attended, exchanged_bytes(config, device, ranks, documents));
  if (!o.json)
    fmt::print("{}: {}\n{}\n", card.name,
               left < 0 ? fmt::format("it does not fit: {:.1f} GB more than its {:.1f} (--fit finds settings that fit)",
                                      gb(-left), gb(room))
                        : fmt::format("{:.1f} of {:.1f} GB are left", gb(left), gb(room)),
               time ? run_time_text(*time, card, /*in_parts=*/true)
                    : "no estimate of its time: no steps in fp32 or with train.lora were measured");
  if (!time) return out;
  const StepTime& step = time->last_step;
  out["tokens_per_s"] = time->tokens_per_s();
  out["run_seconds"] = time->seconds;
  out["run_joules"] = time->joules;
  out["step_seconds"] = {{"products", step.products},   {"attention", step.attention},
                         {"memory_bound", step.memory}, {"update", step.update},
                         {"launches", step.launches},   {"communication", step.communication}};
  return out;
}

// Returns the recommended settings as JSON. Without --json, also prints them as text.
Json describe_recommended(const PlanOptions& o, const Config& config, const Settings& best) {
  const StepCost& cost = best.cost;
  const std::string arguments = arguments_of(best, o.ranks);
  if (!o.json)
    fmt::print(
        "recommended, with the same tokens in a step: {}\n  {}\n",
        fmt::format("{:.3f} GB; of the estimated time {:.1f}% is recomputation, {:.1f}% communication and {:.1f}% "
                    "overhead of micro-steps and update",
                    gb(best.plan.peak_bytes()), 100 * cost.recompute / cost.total(),
                    100 * cost.communication / cost.total(), 100 * cost.overhead / cost.total()),
        arguments);
  return {{"zero", o.ranks > 1 ? best.zero : config.dist.zero},
          {"recompute", best.recompute},
          {"micro_batch_size", best.micro_batch_size},
          {"accumulate_grad_batches", best.accumulate_grad_batches},
          {"arguments", arguments},
          {"peak_bytes", best.plan.peak_bytes()},
          {"seconds_per_token",
           {{"compute", cost.compute},
            {"recompute", cost.recompute},
            {"communication", cost.communication},
            {"overhead", cost.overhead}}}};
}

// Returns the settings that fit in memory as JSON. Without --json, also prints them as text. Throws an Error if nothing
// fits.
Json describe_fit(const PlanOptions& o, const Config& config, const PlannedDevice& device, Comm* ranks,
                  const PlannedDocuments& documents) {
  const TrainConfig& t = config.train;
  const int64_t bytes = memory_of(o, device);
  const DocumentMix& attended = documents.attended.front();
  const std::optional<Settings> best = fit_settings(config, device, bytes, ranks, documents.most, attended);
  const std::optional<BatchFit> batch = fit_batch(config, device, bytes, ranks, documents.most);
  const std::optional<RecomputeFit> recompute = fit_recompute(config, device, bytes, ranks, documents.most, attended);
  if (!best && !batch && !recompute)
    fail("nothing fits in {:.3f} GB: {}", gb(bytes), least_need(config, device, bytes, ranks, documents.most));
  Json fit = {{"memory_bytes", bytes}};
  if (!o.json) fmt::print("these settings fit in {:.3f} GB:\n", gb(bytes));
  if (batch) {
    fit["micro_batch_size"] = batch->micro_batch_size;
    fit["micro_batch_peak_bytes"] = batch->plan.peak_bytes();
    if (!o.json)
      fmt::print("  train.micro_batch_size={} with runtime.recompute={}: {:.3f} GB\n", batch->micro_batch_size,
                 config.recompute.str(), gb(batch->plan.peak_bytes()));
  }
  if (recompute) {
    fit["recompute"] = recompute->recompute;
    fit["recompute_peak_bytes"] = recompute->plan.peak_bytes();
    if (!o.json)
      fmt::print(
          "  runtime.recompute={} with train.micro_batch_size={}: {:.3f} GB, {:.1f}% of a step's FLOPs recomputed\n",
          recompute->recompute, t.micro_batch_size, gb(recompute->plan.peak_bytes()), 100 * recompute->replayed_share);
  }
  if (best) fit["recommended"] = describe_recommended(o, config, *best);
  return fit;
}

void run_plan(const PlanOptions& o) {
  const Config config = load_config(o.config, o.sets).config;
  if (o.fit && !config.train.stages.empty())
    fail_usage(
        "--fit finds settings for steps of one size, and train.stages has {} stages: --set train.stages=null --set "
        "train.steps={}",
        config.train.stages.size(), config.train.steps);
  const PlannedDevice device =
      o.card.empty() ? PlannedDevice(planned_device(config.runtime.device)) : PlannedDevice(card_of(o.card));
  const std::unique_ptr<Comm> ranks = make_planned_comm(o.ranks);
  const PlannedDocuments documents = planned_documents(config);
  const MemoryPlan plan = plan_memory(config, device, ranks.get(), documents.most);
  Json out = describe_plan(o, config, device, plan, documents);
  if (!o.card.empty()) out["card"] = describe_card(o, config, device, plan, ranks.get(), documents);
  if (config.dist.context > 1) out["context"] = describe_shared(o, config, device, ranks.get(), documents);
  if (!config.train.stages.empty()) out["stages"] = describe_stages(o, config, device, ranks.get(), documents);
  if (o.fit) out["fit"] = describe_fit(o, config, device, ranks.get(), documents);
  if (o.json) fmt::print("{}\n", dump_json(out, 2));
}

}  // namespace

void add_plan(CLI::App& app) {
  auto o = std::make_shared<PlanOptions>();
  CLI::App* verb = app.add_subcommand("plan", "predict what a run will use: parameters, FLOPs, memory; needs no GPU");
  verb->add_option("CONFIG", o->config, "config file (default: the environment variable CONFIG names it)");
  verb->add_option("--set", o->sets, "group.key=value: overrides the config file and the environment")
      ->take_all()
      ->expected(1);
  verb->add_option("--ranks", o->ranks,
                   "number of ranks: counts their communication buffers and the shards of dist.zero")
      ->check(within(at_least(1).up_to(1 << 20)));
  verb->add_option("--card", o->card,
                   "plan for this card, which need not be here, and estimate the run's tokens/s, hours and joules on "
                   "it: " +
                       card_words());
  auto* fit = verb->add_flag(
      "--fit", o->fit,
      "also find the largest train.micro_batch_size and the cheapest runtime.recompute that fit in memory, and "
      "recommend the settings of both, and with --ranks of dist.zero, that are estimated to take the least time");
  verb->add_option(
          "--memory-gb", o->memory_gb,
          "memory limit of --fit in 10^9 bytes (default: the card's without 1.5, or what this machine's GPU has free)")
      ->check(within(above(0).up_to(1e6)))
      ->needs(fit);
  verb->add_flag("--json", o->json, "print one JSON object");
  verb->footer(
      "With dist.context the plan also has the bytes that the ranks of a group exchange, and a model of a step's time\n"
      "with the rates of H200 cards: hosts of 8 with NVLink, a network adapter for each card. It is no measurement.");
  verb->callback([o] { run_plan(*o); });
}

}  // namespace triad
