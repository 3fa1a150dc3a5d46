// triad bench step: times a config's whole training steps, as `triad train` runs them, and divides GPU time into kernel
// families. Kernel times are from separate traced steps (kernel_trace.h) without a CUDA graph, because a graph's
// kernels can't be attributed to ops; tracing slows down the host, not the kernels. Kernels may run concurrently
// (engine/fork_join.h), and a kernel that waits for free SMs counts as running, so the families may add up to more than
// a step. "GPU busy" is the time share in which at least one kernel, copy or fill runs, in traced steps with the graph.
// Energy and clock are measured in further steps, because a reading takes the host's time.
//
// Several ranks (mpirun -np N) run the steps together. Rank 0 prints its own times, kernels and memory, and for each
// rank the time that other ranks add to its step, and its card's energy.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "engine/backend.h"
#include "engine/check.h"
#include "engine/process/power.h"
#include "io/data/loader.h"
#include "io/file.h"
#include "kernels/ops/matmul.h"
#include "model/flops.h"
#include "tools/bench/bench.h"
#include "tools/bench/chrome_trace.h"
#include "tools/bench/exchanges.h"
#include "tools/bench/kernel_families.h"
#include "tools/bench/kernel_trace.h"
#include "tools/bench/ranks.h"
#include "tools/options.h"
#include "tools/version.h"
#include "train/checkpoint/state.h"
#include "train/config/device_choice.h"
#include "train/config/load_config.h"
#include "train/dist/rank_groups.h"
#include "train/run/data_source.h"
#include "train/run/memory_plan.h"
#include "train/run/startup.h"
#include "train/step/train_step.h"

namespace triad {

namespace {

struct StepOptions {
  std::string config, weights;
  std::vector<std::string> sets;
  int64_t steps = 20, warm_up = 5, kernels = 0;
  bool no_split = false;
  std::string chrome_trace;
  BenchOptions common;
};

// Steps: runs training steps as the trainer does, without the trainer's work between steps (logs, checkpoints,
// evaluation).
class Steps {
 public:
  Steps(const Config& config, const std::string& weights, Device device, Comm& comm)
      : config_(config),
        device_(device),
        comm_(comm),
        data_(open_data(config)),
        runtime_(allocate_planned(config, device, &comm, data_.most_documents)),
        step_(*runtime_, config_, &comm, data_.most_documents),
        loader_(data_.train, loader_options(config, data_, comm.rank(), comm.world())) {
    runtime_->arena().seal();
    if (weights.empty())
      step_.optimizer().init(ctx(), static_cast<uint64_t>(config.train.seed));
    else
      read_weights(ctx(), step_.model().params(), step_.optimizer(), find_model(weights).weights, step_.shards());
  }

  Context& ctx() { return runtime_->ctx(); }
  Comm& comm() { return comm_; }
  SequenceGroup* sequence_group() { return step_.sequence_group(); }
  int64_t peak_bytes() const {
    return runtime_->arena().capacity_bytes() + (device_.is_cuda() ? kMatmulWorkspaceBytes : 0);
  }
  void take() {
    step_.begin();
    int64_t positions = 0;
    for (int64_t i = 0; i < config_.train.accumulate_grad_batches; ++i) {
      const Batch batch = loader_.next();
      positions = batch.step_targets;
      step_.micro_step(batch.tokens, batch.targets, positions, batch.bounds, {batch.padding_begin, batch.step_tokens});
    }
    step_.update(taken_++, positions);
    if (++queued_ > 1) settle();  // one step stays queued while the host reads the previous result, as in the trainer
  }
  void take(int64_t count) {
    for (int64_t i = 0; i < count; ++i) take();
  }
  // Waits until all the steps' work has ended.
  void drain() {
    while (queued_ > 0) settle();
    ctx().stream.synchronize();
    comm_.stream().synchronize();
  }
  void forget_graphs() { step_.forget_graphs(); }
  // Makes the following steps run without a CUDA graph.
  void leave_graph() { config_.runtime.cuda_graph = false; }
  // What the device reported about each of the last `count` steps, which have ended.
  std::vector<StepResults::Times> parts(int64_t count) const { return {parts_.end() - count, parts_.end()}; }
  // Runs `count` steps and returns their times in us: from one step's beginning to the next one's on the GPU.
  std::vector<double> times_us(int64_t count) {
    std::vector<Event> begins;
    for (int64_t i = 0; i <= count; ++i) {
      begins.emplace_back(device_, true).record(ctx().stream);
      if (i < count) take();
    }
    drain();
    std::vector<double> us;
    for (int64_t i = 0; i < count; ++i)
      us.push_back(begins[static_cast<size_t>(i + 1)].ms_since(begins[static_cast<size_t>(i)]) * 1e3);
    return us;
  }

 private:
  void settle() {
    const TrainStep::Result result = step_.result();
    --queued_;
    parts_.push_back(result.times);
    TRIAD_CHECK(result.finite, "loss {} and gradient norm {} are not both finite", result.loss, result.grad_norm);
  }

  Config config_;
  Device device_;
  Comm& comm_;
  DataSource data_;
  std::unique_ptr<Runtime> runtime_;
  TrainStep step_;
  Loader loader_;
  int64_t taken_ = 0, queued_ = 0;
  std::vector<StepResults::Times> parts_;
};

// Runs `count` steps on all ranks and returns this rank's power, energy and clock.
PowerUse measure_power(Steps& steps, int64_t count) {
  steps.drain();
  const Nvml nvml(backend::pci_address(steps.ctx().device));
  // The least time between two readings, so that short steps seldom wait for one, s.
  constexpr double kBetweenReadings = 0.1;
  const Seconds now;
  std::vector<TimedEnergy> readings = {{now(), nvml.energy()}};
  for (int64_t i = 0; i < count; ++i) {
    steps.take();
    if (now() - readings.back().seconds >= kBetweenReadings) readings.push_back({now(), nvml.energy()});
  }
  steps.drain();
  readings.push_back({now(), nvml.energy()});
  return summarize_power(readings, count, readings.back().seconds - readings.front().seconds);
}

// Mean time and launches per traced step.
struct Spent {
  double us = 0, launches = 0;
};
struct Split {
  std::map<std::string, Spent> family;
  std::map<std::pair<std::string, std::string>, Spent> kernel;  // key: kernel name, op name
  double busy = 0;          // time share in which at least one kernel, copy or fill runs
  double busy_step_us = 0;  // time per step in the trace that measured `busy`, us
};
constexpr int kTracedSteps = 4;

// Runs kTracedSteps steps on all ranks. Returns rank 0's kernels, copies and fills; an empty list elsewhere.
std::vector<Activity> trace_steps(Steps& steps) {
  steps.drain();
  std::optional<KernelTrace> trace;
  if (steps.comm().first()) trace.emplace(steps.ctx());
  steps.take(kTracedSteps);
  steps.drain();
  return trace ? trace->finish() : std::vector<Activity>{};
}

void measure_busy(Split& split, Steps& steps) {
  const std::vector<Activity> all = trace_steps(steps);
  if (all.empty()) return;
  int64_t covered_ns = 0, covered_until = all.front().begin_ns;
  for (const Activity& a : all) {
    covered_ns += std::max<int64_t>(0, a.end_ns - std::max(a.begin_ns, covered_until));
    covered_until = std::max(covered_until, a.end_ns);
  }
  const double ns = static_cast<double>(covered_until - all.front().begin_ns);
  split.busy = static_cast<double>(covered_ns) / ns;
  split.busy_step_us = ns * 1e-3 / kTracedSteps;
}
void measure_families(Split& split, Steps& steps) {
  steps.leave_graph();
  steps.take();
  for (const Activity& a : trace_steps(steps)) {
    const double us = static_cast<double>(a.end_ns - a.begin_ns) * 1e-3 / kTracedSteps;
    for (Spent* spent : {&split.family[family_of(a)], &split.kernel[{a.kernel, a.op}]})
      spent->us += us, spent->launches += 1.0 / kTracedSteps;
  }
}

void print_split(const Split& split, const Config& config, double step_us, const Ceiling& ceiling, int64_t top) {
  const std::map<std::string, double> flops = family_flops(config);
  fmt::print("\n{:<22} {:>9} {:>8} {:>9} {:>9} {:>17}\n", "family", "ms", "of step", "launches", "TFLOP/s",
             "of matrix product");
  bool noise = false;  // some share is
  const auto share = [&](double fraction) {
    noise = noise || is_noise(fraction);
    return share_text(fraction);
  };
  for (const KernelFamily& family : kernel_families()) {
    const auto found = split.family.find(family.name);
    if (found == split.family.end()) continue;
    const Spent& s = found->second;
    fmt::print("{:<22} {:>9.3f} {:>7.1f}% {:>9.0f}", family.name, s.us * 1e-3, 100 * s.us / step_us, s.launches);
    const auto f = flops.find(family.name);
    if (f != flops.end() && f->second > 0)
      fmt::print(" {:>9.1f} {:>17}", f->second / s.us * 1e-6, share(f->second / s.us * 1e-6 / ceiling.tflop_per_s));
    fmt::print("\n");
  }
  if (noise) fmt::print("{}", kNoiseNote);
  fmt::print("GPU busy {:.1f}% of the time (in traced steps of {:.3f} ms)\n", 100 * split.busy,
             split.busy_step_us * 1e-3);
  if (top == 0) return;
  std::vector<std::pair<std::pair<std::string, std::string>, Spent>> kernels(split.kernel.begin(), split.kernel.end());
  std::sort(kernels.begin(), kernels.end(), [](const auto& a, const auto& b) { return a.second.us > b.second.us; });
  fmt::print("\n{:<64} {:<32} {:>9} {:>9}\n", "kernel", "op", "ms", "launches");
  for (size_t i = 0; i < std::min(kernels.size(), static_cast<size_t>(top)); ++i)
    fmt::print("{:<64} {:<32} {:>9.3f} {:>9.0f}\n", kernels[i].first.first.substr(0, 64), kernels[i].first.second,
               kernels[i].second.us * 1e-3, kernels[i].second.launches);
}

Json to_json(const Split& split) {
  Json out = Json::object();
  for (const auto& [name, spent] : split.family) out[name] = {{"us", spent.us}, {"launches", spent.launches}};
  return {{"busy", split.busy}, {"families", out}};
}

// Each rank's part of the timed steps, in the order of ranks. exposed_us: the wait for other ranks after a rank's own
// backward, which no computation hides. On rank 0.
Json gather_ranks(Steps& steps, const std::vector<StepResults::Times>& parts, const PowerUse& use) {
  const auto median_us = [&](double StepResults::Times::*part) {
    std::vector<double> ms;
    for (const StepResults::Times& times : parts) ms.push_back(times.*part);
    return 1e3 * median(ms);
  };
  using Times = StepResults::Times;
  Json mine = {{"compute_us", median_us(&Times::compute)},
               {"exposed_us", median_us(&Times::comm)},
               {"update_us", median_us(&Times::update)},
               {"gather_us", median_us(&Times::gather)}};
  mine.update(to_json(use));
  Json all = Json::array();
  for (const std::string& text : steps.comm().all_gather_host_text(dump_json(mine, -1), "the ranks' times"))
    all.push_back(parse_json(text, "a rank's times"));
  return all;
}

void print_ranks(const Json& ranks, const Comm& comm) {
  fmt::print("\n{:<32} {:>11} {:>20} {:>10} {:>15}\n", "rank", "compute ms", "exposed exchange ms", "update ms",
             "joules a step");
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto ms = [&](const char* key) { return ranks[r][key].get<double>() * 1e-3; };
    fmt::print("{:<32} {:>11.3f} {:>20.3f} {:>10.3f} {:>15}\n", comm.rank_name(static_cast<int>(r)), ms("compute_us"),
               ms("exposed_us"), ms("update_us"),
               ranks[r].contains("joules") ? fmt::format("{:.1f}", ranks[r]["joules"].get<double>()) : "not known");
  }
}

// The config's name, the step's rows and what else decides its time: a kept row is compared with those of its name.
std::string step_case_name(const LoadedConfig& loaded, int64_t ranks) {
  const Config& c = loaded.config;
  const NsaConfig& nsa = c.model.nsa;
  std::string name =
      fmt::format("{} {}x{} {}", loaded.name, c.train.micro_batch_size, c.train.seq_len, word_of(c.model.attention));
  if (c.train.accumulate_grad_batches > 1) name += fmt::format(" x{}", c.train.accumulate_grad_batches);
  if (ranks > 1) name += fmt::format(" on {} ranks", ranks);
  if (c.model.attention == AttentionKind::nsa && nsa.selector == Selector::index) name += ", index";
  if (c.runtime.matmul_dtype == MatmulDType::fp8) name += ", fp8";
  for (const auto& [key, value, usual] :
       {std::tuple{"context", c.dist.context, int64_t{1}}, std::tuple{"zero", ranks > 1 ? c.dist.zero : 0, int64_t{0}},
        std::tuple{"replicas", c.dist.replicas, int64_t{1}}, std::tuple{"select_every", nsa.every, int64_t{1}},
        std::tuple{"lora", c.train.lora ? c.train.lora->rank : 0, int64_t{0}}})
    if (value != usual) name += fmt::format(", {} {}", key, value);
  return name;
}

// Runs the warm-up steps and then the timed steps. Returns a row with the timed steps' results.
Json measure_steps(Steps& steps, const StepOptions& o, const LoadedConfig& loaded, const Ceiling& ceiling) {
  steps.take(o.warm_up);
  const std::vector<double> times = steps.times_us(o.steps);
  const double us = median(times);
  const auto [fastest, slowest] = std::minmax_element(times.begin(), times.end());
  const Config& config = loaded.config;
  const TrainConfig& t = config.train;
  const int64_t B = t.micro_batch_size * t.accumulate_grad_batches, ranks = steps.comm().world();
  const double share = share_of(config),
               executed = training_flops(config.model, B, t.seq_len, config.recompute) * share / us * 1e-6;
  return {{"op", "step"},
          {"case", step_case_name(loaded, ranks)},
          {"pass", "step"},
          {"us", us},
          {"runs", o.steps},
          {"fastest_us", *fastest},
          {"slowest_us", *slowest},
          {"ranks", ranks},
          {"tokens_per_s", static_cast<double>(config.tokens_per_step(ranks)) / us * 1e6},
          {"peak_gb", static_cast<double>(steps.peak_bytes()) * 1e-9},
          {"executed_tflop_per_s", executed},
          {"dense_equivalent_tflop_per_s", dense_equivalent_flops(config.model, B, t.seq_len) * share / us * 1e-6},
          {"share_of_ceiling", executed / ceiling.tflop_per_s}};
}

void print_row(const Json& row, const Ceiling& ceiling) {
  const auto number = [&](const char* key) { return row[key].get<double>(); };
  const double executed = number("executed_tflop_per_s"), dense = number("dense_equivalent_tflop_per_s");
  fmt::print(
      "{}: {:.3f} ms a step ({:.3f} to {:.3f}), {:.0f} tokens/s, peak {:.3f} GB{}executed {:.1f} TFLOP/s ({:.1f}% of "
      "a large matrix product), dense-equivalent {:.1f} ({:.1f}%)\n",
      row["case"].get<std::string>(), number("us") * 1e-3, number("fastest_us") * 1e-3, number("slowest_us") * 1e-3,
      number("tokens_per_s"), number("peak_gb"), row["ranks"] > 1 ? " a card; each " : "; ", executed,
      100 * executed / ceiling.tflop_per_s, dense, 100 * dense / ceiling.tflop_per_s);
}

// Traces one step and writes the trace to the file. If that failed, returns the reason, else "". Ranks without a file
// run the step.
std::string write_trace(std::optional<AtomicFile>& file, Steps& steps) {
  try {
    steps.leave_graph();
    if (!file) {
      steps.take();
      return "";
    }
    file->write(chrome_trace(steps.ctx(), [&] {
      steps.take();
      steps.drain();
    }));
    file->commit();
  } catch (const std::exception& e) { return e.what(); }
  return "";
}

// Runs a few steps and measures the exchanges between the ranks that share sequences.
Json measure_exchanges(Steps& steps) {
  steps.drain();
  steps.leave_graph();  // the meter counts exchanges as they are queued
  ExchangeMeter meter(steps.ctx(), *steps.sequence_group());
  steps.take();
  steps.drain();
  meter.time_waits(kTracedSteps);
  steps.take(kTracedSteps);
  steps.drain();
  return gather_exchanges(steps.comm(), meter.totals(), kTracedSteps);
}

void run_step(const StepOptions& o) {
  const LaunchEnv launch = read_launch_env();
  const bool first = launch.rank == 0, text = first && !o.common.json;
  if (first) o.common.check_files();
  std::optional<AtomicFile> trace_file;
  if (first && !o.chrome_trace.empty()) trace_file.emplace(o.chrome_trace);
  const LoadedConfig loaded = load_config(o.config, o.sets);
  if (const size_t stages = loaded.config.train.stages.size(); stages > 0)
    fail_usage(
        "train.stages has {} stages, and bench step times steps of one kind: --set train.stages=null --set "
        "train.steps={}",
        stages, loaded.config.train.steps);
  const Config& config = loaded.config;
  const Device device = choose_device(config.runtime.device, launch);
  check_ranks(config, launch.world);
  const std::unique_ptr<Comm> comm = connect_ranks(launch, device, config, version_text());
  BenchRows rows{.what = "step", .device = device, .dtype = compute_dtype(config.runtime.precision), .ceiling = {}};
  std::optional<Steps> steps;
  std::string no_trace;
  run_on_ranks(*comm, [&] {
    if (first) {
      Stopwatch stopwatch(device);  // this block ends before the model is allocated, so that the memory is free again
      rows.ceiling = measure_ceiling(device, rows.dtype, stopwatch);
    }
    comm->barrier("the machine's ceilings");
    if (text) fmt::print("{}\n", describe(rows));
    double links = 0;
    if (config.dist.context > 1) links = measure_links(device, comm->group(static_cast<int>(config.dist.context)));
    steps.emplace(config, o.weights, device, *comm);
    rows.rows.push_back(measure_steps(*steps, o, loaded, rows.ceiling));
    Json& row = rows.rows.back();
    if (text) print_row(row, rows.ceiling);
    const std::vector<StepResults::Times> parts = steps->parts(o.steps);
    const PowerUse use = device.is_cuda() ? measure_power(*steps, o.steps) : PowerUse{};
    if (const Json power = to_json(use); !power.empty()) row["power"] = power;
    if (const std::string power = describe(use); text && !power.empty()) fmt::print("{}\n", power);
    if (comm->world() > 1) {
      row["by_rank"] = gather_ranks(*steps, parts, use);
      if (text) print_ranks(row["by_rank"], *comm);
    }
    if (device.is_cuda() && !o.no_split) {
      Split split;
      measure_busy(split, *steps);
      measure_families(split, *steps);
      row.update(to_json(split));
      if (text) print_split(split, config, row["us"], rows.ceiling, o.kernels);
    } else if (text) {
      fmt::print("not split by family: {}\n", device.is_cuda() ? "--no-split" : "that needs a GPU");
    }
    if (config.dist.context > 1) {
      row["exchanges"] = measure_exchanges(*steps);
      row["links_gb_per_s"] = links * 1e-9;
      if (text) print_exchanges(row["exchanges"], links, config.train.accumulate_grad_batches);
    }
    if (text && device.is_cuda()) fmt::print("{}\n", steps->ctx().routes.summary());
    if (!o.chrome_trace.empty()) no_trace = write_trace(trace_file, *steps);
    steps->drain();
    steps->forget_graphs();
    comm->finish();
  });
  if (!first) return;
  rows.finish(o.common);  // comes before a failed trace's error, so the rows aren't lost
  if (!no_trace.empty()) fail("--chrome-trace: {}", no_trace);
}

}  // namespace

CLI::App* add_bench_step(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand("step", "time whole training steps, split by family of kernels");
  const auto o = std::make_shared<StepOptions>();
  verb->add_option("CONFIG", o->config, "config file (default: the environment variable CONFIG names it)");
  verb->add_option("--set", o->sets, "group.key=value: overrides the config file and the environment")
      ->take_all()
      ->expected(1);
  verb->add_option("--weights", o->weights, "a checkpoint (default: fresh weights)");
  const auto count = [&](const char* name, int64_t& value, double least, const char* what) {
    verb->add_option(name, value, what)->check(within(at_least(least).up_to(100000)))->capture_default_str();
  };
  count("--steps", o->steps, 1, "timed steps; the result is their median");
  count("--warm-up", o->warm_up, 0, "steps before the timed ones");
  count("--kernels", o->kernels, 0, "also list this many kernels, the ones that take longest");
  verb->add_flag("--no-split", o->no_split, "time whole steps only, not families of kernels: needs no CUPTI");
  verb->add_option("--chrome-trace", o->chrome_trace,
                   "run one more step and write its trace for chrome://tracing or Perfetto");
  verb->footer(
      "Two rates are printed. \"executed\" counts the FLOPs of matrix products and attention as they run, recomputed\n"
      "ones included; \"dense-equivalent\" counts those of the same model with dense attention. The table divides a\n"
      "step into families of kernels, timed by CUPTI in separate steps. Kernels that run at the same time each count\n"
      "in full, so the families may add up to more than a step. With several ranks (mpirun -np N) times, kernels and\n"
      "memory are those of rank 0. With dist.context a second table has what ranks that share a sequence exchange.");
  o->common.add_output_to(*verb);
  verb->callback([o] { run_step(*o); });
  return verb;
}

}  // namespace triad
