#include "tools/bench/measure.h"

#include <fmt/format.h>

#include <deque>

#include "engine/check.h"
#include "kernels/common/op_case_args.h"
#include "kernels/ops/matmul.h"
#include "kernels/step/traffic.h"

namespace triad {

bool is_noise(double share) { return share < 0 || share > 1; }

std::string share_text(double share) {
  return fmt::format("{:.1f}%{}", 100 * share, is_noise(share) ? kNoiseMark : "");
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Stopwatch::Stopwatch(Device device, std::function<double(double)> longest)
    : device_(device), longest_(std::move(longest)) {
  if (!device.is_cuda()) return;
  constexpr int64_t kTimesL2 = 3;
  const int64_t bytes = kTimesL2 * backend::info(device).l2_bytes;
  flush_ = std::make_unique<Arena>(device, bytes);
  flush_memory_ = flush_->alloc(MemTag::workspace, "L2 flush", DType::u8, {bytes});
}

void Stopwatch::flush(Context& ctx, int run, Flush how) {
  backend::fill(flush_memory_.data, device_, run & 0xff, flush_memory_.bytes(), ctx.stream.handle());
  if (how == Flush::read) traffic(ctx, {}, flush_memory_);
}

Ceiling measure_ceiling(Device device, DType dtype, Stopwatch& stopwatch) {
  const int64_t copied = device.is_cuda() ? int64_t{1} << 30 : int64_t{1} << 28;
  const int64_t n = device.is_cuda() ? 8192 : 1024;
  const int64_t matrix_bytes = n * n * size_of(dtype);
  // On the CPU, a bf16 product converts its operands to f32 and rounds its result, in scratch memory.
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
  // The operands are random numbers, because multiplying zeros uses less power and runs faster than any real one.
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

EnergyMeter::EnergyMeter(Device device) {
  if (!device.is_cuda()) fail_usage("--energy: the device is {}, and only a GPU's energy is measured", device.str());
  nvml_ = std::make_unique<Nvml>(backend::pci_address(device));
  if (!nvml_->energy().energy_j)
    fail_usage("--energy: {} reports no energy (NVML, nvmlDeviceGetTotalEnergyConsumption)",
               backend::info(device).name);
}

PowerUse EnergyMeter::operator()(Context& ctx, double us, const std::function<void()>& work) const {
  constexpr double kWarmUp = 0.5, kMeasured = 3, kBatch = 0.01;  // seconds
  const int64_t batch = std::max<int64_t>(1, static_cast<int64_t>(kBatch * 1e6 / us));
  std::deque<Event> queued;
  const auto queue_batch = [&] {
    for (int64_t i = 0; i < batch; ++i) work();
    queued.emplace_back(ctx.device, true).record(ctx.stream);
  };
  const Seconds now;
  std::vector<TimedEnergy> readings;
  int64_t runs = -batch;  // those between the first and the last reading
  queue_batch();
  while (readings.empty() || readings.back().seconds - readings.front().seconds < kMeasured) {
    queue_batch();  // the card has work while the host reads
    queued.front().synchronize();
    queued.pop_front();
    if (now() < kWarmUp) continue;
    readings.push_back({now(), nvml_->energy()});
    runs += batch;
  }
  ctx.stream.synchronize();
  return summarize_power(readings, runs, readings.back().seconds - readings.front().seconds);
}

Json to_json(const PowerUse& use) {
  Json out = Json::object();
  const auto add = [&](const char* key, const std::optional<double>& value) {
    if (value) out[key] = *value;
  };
  add("joules", use.joules), add("watts", use.watts), add("limit_w", use.limit_w);
  add("clock_mhz", use.clock_mhz), add("max_clock_mhz", use.max_clock_mhz), add("capped_share", use.capped_share);
  return out;
}

template <class Work>
double MemoryTimes::time_us(int64_t from_bytes, int64_t to_bytes, Flush how, Work&& work) {
  Runtime runtime({.device = device_, .arena_bytes = align_up(from_bytes) + align_up(to_bytes)});
  const auto alloc = [&](const char* name, int64_t bytes) {
    return bytes == 0 ? Tensor{} : runtime.arena().alloc(MemTag::workspace, name, DType::u8, {bytes});
  };
  const Tensor from = alloc("from", from_bytes), to = alloc("to", to_bytes);
  if (!from.empty()) zero(runtime.ctx(), from);
  return stopwatch_(
             runtime.ctx(), [&] { work(runtime.ctx(), to, from); }, how)
      .us;
}

double MemoryTimes::copy_us(double bytes, Flush how) {
  const int64_t half = static_cast<int64_t>(bytes / 2);
  const auto [known, is_new] = copies_.try_emplace({half, how});
  if (is_new)
    known->second = time_us(half, half, how, [](Context& ctx, Tensor to, Tensor from) { copy(ctx, to, from); });
  return known->second;
}

double MemoryTimes::traffic_us(double read, double written) {
  constexpr int64_t kVector = 16;
  const auto whole = [](double bytes) { return static_cast<int64_t>(bytes) / kVector * kVector; };
  const auto [known, is_new] = traffic_.try_emplace({whole(read), whole(written)});
  if (is_new)
    known->second = time_us(whole(read), whole(written), Flush::written,
                            [](Context& ctx, Tensor to, Tensor from) { traffic(ctx, to, from); });
  return known->second;
}

}  // namespace triad
