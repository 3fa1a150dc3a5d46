// triad bench: times the bench cases of every op, forward and backward, and sets each against what this machine
// reaches: the bandwidth of a device copy and the rate of a large matrix product, both measured at the start.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "engine/check.h"
#include "kernels/matmul.h"
#include "kernels/op_case_args.h"
#include "tools/verbs.h"
#include "train/train_step.h"

namespace triad {

namespace {

struct BenchOptions {
  std::vector<std::string> ops;
  bool list = false, json = false;
  std::string device = "auto", dtype;
};

struct Ceiling {
  double gb_per_s = 0, tflop_per_s = 0;
};

// How close a kernel comes to the nearer of the two ceilings.
struct Share {
  double share;
  const char* limited_by;
};

struct Timing {
  double us = 0;  // median
  int runs = 0;
};

struct Result {
  const OpCase* op_case;
  const char* pass;
  double flops, bytes;
  Timing timing;
  std::string skipped;  // why, where it was not run

  double gb_per_s() const { return bytes / timing.us * 1e-3; }
  double tflop_per_s() const { return flops / timing.us * 1e-6; }
  Share share_of(const Ceiling& c) const {
    const double memory = gb_per_s() / c.gb_per_s, compute = tflop_per_s() / c.tflop_per_s;
    return memory >= compute ? Share{memory, "memory"} : Share{compute, "compute"};
  }
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Times work on a context's stream. On a GPU the L2 cache is filled with other data before every run, and runs are
// queued without waiting, so that the host's launches hide behind the device's work.
class Stopwatch {
 public:
  explicit Stopwatch(Device device) : device_(device) {
    if (!device.is_cuda()) return;
    constexpr int64_t kTimesL2 = 3;
    flush_ = std::make_unique<Arena>(device, flush_bytes_ = kTimesL2 * backend::info(device).l2_bytes);
    flush_memory_ = flush_->alloc(MemTag::workspace, "L2 flush", DType::u8, {flush_bytes_});
  }

  template <class Work>
  Timing operator()(Context& ctx, Work&& work) {
    return device_.is_cuda() ? time_gpu(ctx, work) : time_cpu(ctx, work);
  }

 private:
  template <class Work>
  Timing time_gpu(Context& ctx, Work& work) {
    constexpr int kWarmUps = 3, kRuns = 31;
    for (int i = 0; i < kWarmUps; ++i) work();
    std::vector<Event> begin, end;
    for (int i = 0; i < kRuns; ++i) {
      begin.emplace_back(device_, true);
      end.emplace_back(device_, true);
      backend::fill(flush_memory_.data, device_, i & 0xff, flush_bytes_, ctx.stream.handle());
      begin[i].record(ctx.stream);
      work();
      end[i].record(ctx.stream);
    }
    ctx.stream.synchronize();
    std::vector<double> us;
    for (int i = 0; i < kRuns; ++i) us.push_back(end[i].ms_since(begin[i]) * 1e3);
    return {median(us), kRuns};
  }

  // As many runs as fit into two seconds, 15 at most, after one that warms up.
  template <class Work>
  static Timing time_cpu(Context& ctx, Work& work) {
    constexpr double kBudgetUs = 2e6;
    const auto once = [&] {
      Event begin(Device::cpu(), true), end(Device::cpu(), true);
      begin.record(ctx.stream);
      work();
      end.record(ctx.stream);
      return end.ms_since(begin) * 1e3;
    };
    const int runs = static_cast<int>(std::clamp(kBudgetUs / std::max(once(), 1.0), 1.0, 15.0));
    std::vector<double> us;
    for (int i = 0; i < runs; ++i) us.push_back(once());
    return {median(us), runs};
  }

  Device device_;
  int64_t flush_bytes_ = 0;
  std::unique_ptr<Arena> flush_;
  Tensor flush_memory_;
};

// A copy of 1 GiB (CPU: 256 MiB), and a square matrix product in the dtype of the bench.
Ceiling measure_ceiling(Device device, DType dtype, Stopwatch& stopwatch) {
  const int64_t copied = device.is_cuda() ? int64_t{1} << 30 : int64_t{1} << 28;
  const int64_t n = device.is_cuda() ? 8192 : 1024;
  const int64_t matrix_bytes = n * n * size_of(dtype);
  // bf16 products on the CPU widen their operands and round their result, through scratch.
  const int64_t scratch_bytes = device.is_cuda() ? 0 : 3 * n * n * size_of(DType::f32);
  Runtime runtime(
      {.device = device, .arena_bytes = 2 * copied + 3 * matrix_bytes + scratch_bytes, .scratch_bytes = scratch_bytes});
  Context& ctx = runtime.ctx();
  const auto alloc = [&](const char* name, DType type, const Shape& shape) {
    const Tensor t = runtime.arena().alloc(MemTag::workspace, name, type, shape);
    zero(ctx, t);
    return t;
  };
  const Tensor from = alloc("from", DType::u8, {copied}), to = alloc("to", DType::u8, {copied});
  const Tensor a = alloc("a", dtype, {n, n}), b = alloc("b", dtype, {n, n}), d = alloc("d", dtype, {n, n});
  // Random bits of real weights: a product of zeros takes less power and runs faster than any that matters.
  std::vector<std::byte> host(static_cast<size_t>(matrix_bytes));
  const Arg normal{.name = "a", .role = ArgRole::constant, .shape = {n, n}};
  for (const Tensor& t : {a, b}) {
    fill_slot({.arg = &normal, .name = normal.name}, host.data(), dtype, 1, 0);
    write(ctx, t, host.data());
  }
  const Timing copy_time = stopwatch(ctx, [&] { copy(ctx, to, from); });
  const Timing product_time = stopwatch(ctx, [&] { matmul(ctx, d, a, b, {.trans_b = true}); });
  return {2e-3 * static_cast<double>(copied) / copy_time.us, 2e-6 * static_cast<double>(n * n * n) / product_time.us};
}

// One case in memory: arguments with their first values, scratch as planned.
class BenchRun {
 public:
  BenchRun(const OpCase& c, Device device, DType dtype) : slots_(slots_of(c)) {
    const int64_t scratch_bytes = planned_scratch_bytes(c, device, dtype);
    runtime_ =
        std::make_unique<Runtime>(Runtime::Options{.device = device,
                                                   .arena_bytes = argument_bytes(c, dtype) + align_up(scratch_bytes),
                                                   .scratch_bytes = scratch_bytes});
    std::vector<std::byte> host;
    for (size_t s = 0; s < slots_.size(); ++s) {
      const Slot& slot = slots_[s];
      const DType type = dtype_in(slot.type, dtype);
      const Tensor memory = runtime_->arena().alloc(MemTag::io, slot.name, type, {slot.elements()});
      zero(ctx(), memory);
      if (slot.kind == SlotKind::fixed) {
        host.assign(static_cast<size_t>(memory.bytes()), std::byte{0});
        fill_slot(slot, host.data(), type, 1, s);
        write(ctx(), memory, host.data());
      }
      args_.set(slot.name, slot_view(slot, memory.data, type, device));
    }
    ctx().stream.synchronize();
  }
  static int64_t argument_bytes(const OpCase& c, DType dtype) {
    int64_t bytes = 0;
    for (const Slot& slot : slots_of(c)) bytes += align_up(slot.elements() * size_of(dtype_in(slot.type, dtype)));
    return bytes;
  }
  Context& ctx() { return runtime_->ctx(); }
  const Args& args() const { return args_; }

 private:
  std::vector<Slot> slots_;
  std::unique_ptr<Runtime> runtime_;
  Args args_;
};

// The sizes of the bench are a GPU's. On the CPU one is run only if it ends within seconds.
std::string too_large(const OpCase& c, Device device, DType dtype) {
  constexpr double kCpuFlops = 2e11;
  const int64_t bytes = BenchRun::argument_bytes(c, dtype) + planned_scratch_bytes(c, device, dtype);
  const int64_t free = backend::info(device).free_bytes;
  if (bytes > free) return fmt::format("needs {} MiB, {} MiB are free", bytes >> 20, free >> 20);
  const double flops = std::max(c.forward_flops, c.backward_flops);
  if (!device.is_cuda() && flops > kCpuFlops) return fmt::format("too large for the CPU: {:.2g} FLOP", flops);
  return "";
}

void bench_case(const OpCase& c, Device device, DType dtype, Stopwatch& stopwatch, std::vector<Result>& results) {
  if (device.is_cuda() && !(dtype == DType::bf16 ? c.gpu_bf16 : c.gpu_f32)) {
    results.push_back({&c, "", 0, 0, {}, fmt::format("not built for {}", name_of(dtype))});
    return;
  }
  if (const std::string why = too_large(c, device, dtype); !why.empty()) {
    results.push_back({&c, "", 0, 0, {}, why});
    return;
  }
  const double element_scale = static_cast<double>(size_of(dtype)) / 2;  // the table's bytes are for 2-byte elements
  BenchRun run(c, device, dtype);
  const Timing forward = stopwatch(run.ctx(), [&] { c.forward(run.ctx(), run.args()); });
  results.push_back({&c, "forward", c.forward_flops, c.forward_bytes * element_scale, forward, ""});
  if (!c.backward) return;
  const Timing backward = stopwatch(run.ctx(), [&] { c.backward(run.ctx(), run.args()); });
  results.push_back({&c, "backward", c.backward_flops, c.backward_bytes * element_scale, backward, ""});
}

void print_table(std::span<const Result> results, const Ceiling& ceiling) {
  fmt::print("{:<24} {:<40} {:<8} {:>11} {:>9} {:>9} {:>8}\n", "op", "case", "pass", "us", "GB/s", "TFLOP/s",
             "ceiling");
  for (const Result& r : results) {
    if (!r.skipped.empty()) {
      fmt::print("{:<24} {:<40} skipped: {}\n", r.op_case->op, r.op_case->name, r.skipped);
      continue;
    }
    const Share share = r.share_of(ceiling);
    fmt::print("{:<24} {:<40} {:<8} {:>11.1f} {:>9.1f} {:>9.3g} {:>6.1f}% {}\n", r.op_case->op, r.op_case->name, r.pass,
               r.timing.us, r.gb_per_s(), r.tflop_per_s(), 100 * share.share, share.limited_by);
  }
}

nlohmann::ordered_json to_json(std::span<const Result> results, const Ceiling& ceiling, Device device, DType dtype) {
  nlohmann::ordered_json out;
  out["device"] = {{"name", backend::info(device).name}, {"kind", device.str()}};
  out["dtype"] = name_of(dtype);
  out["ceiling"] = {{"gb_per_s", ceiling.gb_per_s}, {"tflop_per_s", ceiling.tflop_per_s}};
  out["results"] = nlohmann::ordered_json::array();
  for (const Result& r : results) {
    nlohmann::ordered_json j = {{"op", r.op_case->op}, {"case", r.op_case->name}};
    if (!r.skipped.empty()) {
      j["skipped"] = r.skipped;
    } else {
      const Share share = r.share_of(ceiling);
      j["pass"] = r.pass;
      j["us"] = r.timing.us;
      j["runs"] = r.timing.runs;
      j["gb_per_s"] = r.gb_per_s();
      j["tflop_per_s"] = r.tflop_per_s();
      j["share_of_ceiling"] = share.share;
      j["limited_by"] = share.limited_by;
    }
    out["results"].push_back(j);
  }
  return out;
}

// The bench cases of the named ops, of all where none is named.
std::vector<OpCase> chosen_cases(const std::vector<std::string>& ops) {
  std::vector<OpCase> cases = all_op_cases();
  std::erase_if(cases, [](const OpCase& c) { return !c.bench; });
  std::set<std::string> known;
  for (const OpCase& c : cases) known.insert(c.op);
  for (const std::string& op : ops)
    if (!known.contains(op)) fail_usage("bench: no op is called {}; there are {}", op, fmt::join(known, ", "));
  if (!ops.empty())
    std::erase_if(cases, [&](const OpCase& c) { return std::find(ops.begin(), ops.end(), c.op) == ops.end(); });
  return cases;
}

DeviceChoice parse_device(const std::string& word) {
  for (const auto& [name, choice] : EnumWords<DeviceChoice>::words)
    if (name == word) return choice;
  fail_usage("--device is {}, not {}", word, all_words<DeviceChoice>());
}

void run_bench(const BenchOptions& o) {
  const std::vector<OpCase> cases = chosen_cases(o.ops);
  if (o.list) {
    for (const OpCase& c : cases) fmt::print("{:<24} {}\n", c.op, c.name);
    return;
  }
  const Device device = choose_device(parse_device(o.device));
  const DType dtype = o.dtype == "f32" || (o.dtype.empty() && !device.is_cuda()) ? DType::f32 : DType::bf16;
  Stopwatch stopwatch(device);
  const Ceiling ceiling = measure_ceiling(device, dtype, stopwatch);
  if (!o.json)
    fmt::print("{} ({}), {}: copies {:.0f} GB/s, multiplies matrices at {:.2f} TFLOP/s\n", backend::info(device).name,
               device.str(), name_of(dtype), ceiling.gb_per_s, ceiling.tflop_per_s);
  std::vector<Result> results;
  for (const OpCase& c : cases) bench_case(c, device, dtype, stopwatch, results);
  if (o.json) {
    fmt::print("{}\n", to_json(results, ceiling, device, dtype).dump(2));
  } else {
    print_table(results, ceiling);
  }
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("bench", "time the kernels, against what this machine can do");
  const auto options = std::make_shared<BenchOptions>();
  verb->add_option("op", options->ops, "ops to time (default: all)");
  verb->add_flag("--list", options->list, "name the ops and their cases, and time nothing");
  verb->add_flag("--json", options->json, "JSON instead of a table");
  verb->add_option("--device", options->device, "auto, cpu or cuda");
  verb->add_option("--dtype", options->dtype, "bf16 or f32 (default: bf16 on a GPU, f32 on the CPU)")
      ->check(CLI::IsMember({"bf16", "f32"}));
  verb->callback([options] { run_bench(*options); });
}

}  // namespace triad
