// triad bench: times every op's bench cases, forward and backward, and compares each with this machine's ceilings,
// which are measured at the start: a device copy's bandwidth and a large matrix product's rate. A memory-bound op is
// also compared with an equally large copy (share_of_copy in its row) and with a kernel that only reads and writes as
// many bytes as the op does (share_of_traffic). us_clean and share_of_copy_clean are for the same comparison with a
// copy, but with no modified lines in the L2 cache at the start. The verbs attention, step, prefill and decode have
// their own files.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <memory>
#include <optional>
#include <set>
#include <span>

#include "engine/check.h"
#include "kernels/common/op_case_args.h"
#include "tools/bench/bench.h"
#include "tools/verbs.h"

namespace triad {

namespace {

struct OpsOptions {
  std::vector<std::string> ops;
  bool list = false;
  BenchOptions common;
};

// One case in device memory: its arguments, initialized, and scratch memory as planned.
class BenchRun {
 public:
  BenchRun(const OpCase& c, Device device, DType dtype) : slots_(slots_of(c)) {
    const int64_t scratch_bytes = planned_scratch_bytes(c, device, dtype);
    runtime_ =
        std::make_unique<Runtime>(Runtime::Options{.device = device,
                                                   .arena_bytes = argument_bytes(c, dtype) + align_up(scratch_bytes),
                                                   .scratch_bytes = scratch_bytes,
                                                   .kernels = c.kernels});
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

// The reason for which a case is skipped, or "". The sizes are made for a GPU; a CPU runs only cases that end within
// seconds.
std::string too_large(const OpCase& c, Device device, DType dtype) {
  constexpr double kCpuFlops = 2e11;
  const int64_t bytes = BenchRun::argument_bytes(c, dtype) + planned_scratch_bytes(c, device, dtype);
  const int64_t free = backend::info(device).free_bytes;
  if (bytes > free) return fmt::format("needs {} MiB, {} MiB are free", bytes >> 20, free >> 20);
  const double flops = std::max(c.forward_flops, c.backward_flops);
  if (!device.is_cuda() && flops > kCpuFlops) return fmt::format("too large for the CPU: {:.2g} FLOP", flops);
  return "";
}

// Measures ops and collects their rows.
struct OpsBench {
  Device device;
  DType dtype;
  Stopwatch stopwatch{device};
  MemoryTimes memory_times{device, stopwatch};
  BenchRows rows{.what = "op", .device = device, .dtype = dtype, .ceiling = measure_ceiling(device, dtype, stopwatch)};

  std::optional<EnergyMeter> energy = {};  // absent without --energy
  std::string fallbacks = {};              // one line for each case in which a kernel fell back to a slower one

  void skip(const OpCase& c, const std::string& why) {
    rows.rows.push_back({{"op", c.op}, {"case", c.name}, {"skipped", why}});
  }
  // Times for a forward or backward pass. dirty: after Flush::written. clean: after Flush::read, only for memory-bound
  // work on a GPU.
  struct Pass {
    double flops, bytes;
    Timing dirty, clean;
    PowerUse power = {};  // empty without --energy
  };
  template <class Work>
  Pass time(Context& ctx, double flops, double bytes, Work&& work) {
    Pass pass{.flops = flops, .bytes = bytes, .dirty = stopwatch(ctx, work), .clean = {}};
    if (device.is_cuda() && memory_bound(pass)) pass.clean = stopwatch(ctx, work, Flush::read);
    if (energy) pass.power = (*energy)(ctx, pass.dirty.us, work);
    return pass;
  }
  bool memory_bound(const Pass& p) const {
    return p.bytes * 1e-3 / rows.ceiling.gb_per_s >= p.flops * 1e-6 / rows.ceiling.tflop_per_s;
  }
  // Adds a pass's row. written: how many bytes are written; OpCase::kHalf: half of all bytes.
  void add(const OpCase& c, const char* name, double written, const Pass& pass) {
    const auto& [flops, bytes, t, clean, power] = pass;
    const double memory = bytes / t.us * 1e-3 / rows.ceiling.gb_per_s;
    const double compute = flops / t.us * 1e-6 / rows.ceiling.tflop_per_s;
    Json row = {{"op", c.op},
                {"case", c.name},
                {"pass", name},
                {"us", t.us},
                {"runs", t.runs},
                {"gb_per_s", bytes / t.us * 1e-3},
                {"tflop_per_s", flops / t.us * 1e-6},
                {"share_of_ceiling", std::max(memory, compute)},
                {"limited_by", memory_bound(pass) ? "memory" : "compute"}};
    if (memory_bound(pass)) {
      row["share_of_copy"] = memory_times.copy_us(bytes) / t.us;
      if (clean.runs > 0) {
        row["us_clean"] = clean.us;
        row["share_of_copy_clean"] = memory_times.copy_us(bytes, Flush::read) / clean.us;
      }
      if (written == OpCase::kHalf) written = bytes / 2;
      row["share_of_traffic"] = memory_times.traffic_us(bytes - written, written) / t.us;
    }
    if (energy) row["power"] = to_json(power);
    rows.rows.push_back(std::move(row));
  }
};

void bench_case(OpsBench& bench, const OpCase& c) {
  if (bench.device.is_cuda() && !(bench.dtype == DType::bf16 ? c.gpu_bf16 : c.gpu_f32))
    return bench.skip(c, fmt::format("not built for {}", name_of(bench.dtype)));
  if (const std::string why = too_large(c, bench.device, bench.dtype); !why.empty()) return bench.skip(c, why);
  // The cases state their bytes for bf16, 2 bytes per element.
  const double element_scale = static_cast<double>(size_of(bench.dtype)) / 2;
  const auto scaled = [&](double bytes) { return bytes == OpCase::kHalf ? bytes : bytes * element_scale; };
  OpsBench::Pass forward{}, backward{};
  {  // this block ends before the copies are timed, so that its memory is free again
    BenchRun run(c, bench.device, bench.dtype);
    forward =
        bench.time(run.ctx(), c.forward_flops, scaled(c.forward_bytes), [&] { c.forward(run.ctx(), run.args()); });
    if (c.backward)
      backward =
          bench.time(run.ctx(), c.backward_flops, scaled(c.backward_bytes), [&] { c.backward(run.ctx(), run.args()); });
    if (run.ctx().routes.fallbacks() > 0)
      bench.fallbacks += fmt::format("{} {}: {}\n", c.op, c.name, run.ctx().routes.summary());
  }
  bench.add(c, "forward", scaled(c.forward_written), forward);
  if (c.backward) bench.add(c, "backward", scaled(c.backward_written), backward);
}

void print_table(std::span<const Json> rows) {
  fmt::print("{:<24} {:<40} {:<8} {:>11} {:>9} {:>9} {:>15} {:>10} {:>13} {:>20}\n", "op", "case", "pass", "us", "GB/s",
             "TFLOP/s", "of the ceiling", "of a copy", "of traffic", "of a copy, L2 clean");
  bool noise = false;  // some share is
  for (const Json& r : rows) {
    fmt::print("{:<24} {:<40} ", r["op"].get<std::string>(), r["case"].get<std::string>());
    if (r.contains("skipped")) {
      fmt::print("skipped: {}\n", r["skipped"].get<std::string>());
      continue;
    }
    const auto share = [&](const char* key) {
      noise = noise || is_noise(r[key].get<double>());
      return share_text(r[key].get<double>());
    };
    fmt::print("{:<8} {:>11.1f} {:>9.1f} {:>9.3g} {:>7} {:<7}", r["pass"].get<std::string>(), r["us"].get<double>(),
               r["gb_per_s"].get<double>(), r["tflop_per_s"].get<double>(), share("share_of_ceiling"),
               r["limited_by"].get<std::string>());
    if (r.contains("share_of_copy")) fmt::print(" {:>10} {:>13}", share("share_of_copy"), share("share_of_traffic"));
    if (r.contains("us_clean"))
      fmt::print(" {:>10.1f} us {:>6}", r["us_clean"].get<double>(), share("share_of_copy_clean"));
    if (r.contains("power") && r["power"].contains("joules"))
      fmt::print("  {:.4g} mJ, {:.0f} W", 1e3 * r["power"]["joules"].get<double>(), r["power"]["watts"].get<double>());
    fmt::print("\n");
  }
  if (noise) fmt::print("{}", kNoiseNote);
}

// Bench cases for the named ops, or of all ops if none is named.
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

void run_bench(const OpsOptions& o) {
  const std::vector<OpCase> cases = chosen_cases(o.ops);
  if (o.list) {
    for (const OpCase& c : cases) fmt::print("{:<24} {}\n", c.op, c.name);
    return;
  }
  o.common.check_files();
  const Device device = o.common.chosen_device();
  OpsBench bench{.device = device, .dtype = o.common.chosen_dtype(device)};
  if (o.common.energy) bench.energy.emplace(device);
  if (!o.common.json) fmt::print("{}\n", describe(bench.rows));
  for (const OpCase& c : cases) bench_case(bench, c);
  if (!o.common.json) {
    print_table(bench.rows.rows);
    fmt::print("{}", bench.fallbacks);
  }
  bench.rows.finish(o.common);
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("bench", "time every op and compare it with what this machine can do");
  const auto options = std::make_shared<OpsOptions>();
  verb->add_option("op", options->ops, "ops to time (default: all)");
  verb->add_flag("--list", options->list, "list the ops and their cases, and time nothing");
  verb->footer(
      "The last columns give an op's speed as a percentage of a reference speed, measured in the same run:\n"
      "  of the ceiling       a large device copy, if memory limits the op; a large matrix product, if compute does\n"
      "  of a copy            a device copy of as many bytes as the op moves\n"
      "  of traffic           a kernel that only reads and writes as many bytes as the op does\n"
      "  of a copy, L2 clean  a device copy; the op and the copy begin without modified lines in the L2 cache\n"
      "Only ops that memory limits have the last three columns.\n");
  options->common.add_to(*verb);
  options->common.add_energy_to(*verb);
  const std::array subcommands = {add_bench_attention(*verb), add_bench_step(*verb), add_bench_prefill(*verb),
                                  add_bench_decode(*verb)};
  verb->callback([=] {
    if (std::none_of(subcommands.begin(), subcommands.end(), [](CLI::App* subcommand) { return subcommand->parsed(); }))
      run_bench(*options);
  });
}

}  // namespace triad
