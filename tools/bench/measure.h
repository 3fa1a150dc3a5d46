// Timing for `triad bench`: medians by events with a cold L2 cache, and this machine's ceilings, a device copy's
// bandwidth and a large matrix product's rate.
#pragma once
#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/context.h"
#include "engine/process/power.h"
#include "io/json_config.h"

namespace triad {

double median(std::vector<double> values);

// A share as text: "87.3%", and with a mark if it is noise: negative, or above 1, which only noise of the measurement
// makes it.
inline constexpr const char* kNoiseMark = "~";
inline constexpr const char* kNoiseNote =
    "~: noise of the measurement: less than nothing, or more than all of what it is a share of\n";
bool is_noise(double share);
std::string share_text(double share);

struct Timing {
  double us = 0;  // median time per run
  int runs = 0;
};

// What fills the L2 cache before a timed run. written: modified lines from other data, as a preceding kernel leaves
// them. The timed work then pays for writing them back; an op that only reads n bytes evicts more lines than a copy
// that moves n bytes in all. read: the same data, which is then read again until nothing is left to write back, so that
// an op and a copy start under equal conditions.
enum class Flush { written, read };

// Stopwatch: times work on a context's stream. On a GPU the L2 cache is flushed before every run, and all runs are
// queued without waiting, so that launching a run overlaps the device's work on earlier ones.
class Stopwatch {
 public:
  // longest: for work that several ranks do together, returns the longest run time among them, so that all choose
  // equally many runs. Without it each rank is alone.
  explicit Stopwatch(Device device, std::function<double(double)> longest = {});

  template <class Work>
  Timing operator()(Context& ctx, Work&& work, Flush how = Flush::written) {
    return device_.is_cuda() ? time_gpu(ctx, work, how) : time_cpu(ctx, work);
  }

 private:
  template <class Work>
  double first_us(Context& ctx, Work& work) const {
    const double us = once_us(ctx, work);
    return longest_ ? longest_(us) : us;
  }
  template <class Work>
  static double once_us(Context& ctx, Work& work) {
    Event begin(ctx.device, true), end(ctx.device, true);
    begin.record(ctx.stream);
    work();
    end.record(ctx.stream);
    if (ctx.device.is_cuda()) end.synchronize();
    return end.ms_since(begin) * 1e3;
  }

  // Times on a GPU: as many runs as fit into a second, 15 to 31, after three warm-up runs. Work that itself takes half
  // a second or more, whose times differ little, has 5 runs after two.
  template <class Work>
  Timing time_gpu(Context& ctx, Work& work, Flush how) {
    constexpr int kWarmUps = 3;
    constexpr double kBudgetUs = 1e6, kLongUs = kBudgetUs / 2;
    work();
    double once = first_us(ctx, work);
    for (int i = 2; i < kWarmUps && once < kLongUs; ++i) once = first_us(ctx, work);
    const int runs = once < kLongUs ? static_cast<int>(std::clamp(kBudgetUs / once, 15.0, 31.0)) : 5;
    std::vector<Event> begin, end;
    for (int i = 0; i < runs; ++i) {
      begin.emplace_back(device_, true);
      end.emplace_back(device_, true);
      flush(ctx, i, how);
      begin[i].record(ctx.stream);
      work();
      end[i].record(ctx.stream);
    }
    ctx.stream.synchronize();
    std::vector<double> us;
    for (int i = 0; i < runs; ++i) us.push_back(end[i].ms_since(begin[i]) * 1e3);
    return {median(us), runs};
  }

  // Times on the CPU: as many runs as fit into two seconds, 1 to 15, after one warm-up run.
  template <class Work>
  Timing time_cpu(Context& ctx, Work& work) {
    constexpr double kBudgetUs = 2e6;
    const int runs = static_cast<int>(std::clamp(kBudgetUs / std::max(first_us(ctx, work), 1.0), 1.0, 15.0));
    std::vector<double> us;
    for (int i = 0; i < runs; ++i) us.push_back(once_us(ctx, work));
    return {median(us), runs};
  }

  void flush(Context& ctx, int run, Flush how);

  Device device_;
  std::function<double(double)> longest_;
  std::unique_ptr<Arena> flush_;
  Tensor flush_memory_;
};

struct Ceiling {
  double gb_per_s = 0;     // bytes that a 1 GiB copy (on the CPU 256 MiB) reads and writes per second
  double tflop_per_s = 0;  // product rate, random 8192 x 8192 matrices (on the CPU 1024 x 1024)

  // The least time that work with these FLOPs and bytes needs at these rates.
  double floor_us(double flops, double bytes) const {
    return std::max(flops / tflop_per_s * 1e-6, bytes / gb_per_s * 1e-3);
  }
};
Ceiling measure_ceiling(Device, DType, Stopwatch&);

// Seconds since the object was made.
class Seconds {
 public:
  double operator()() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
};

// EnergyMeter: the energy of work on a GPU. The work is queued again and again for some seconds, with whatever the runs
// before leave in L2, while the card's counter is read; so one measurement takes 3.5 s.
class EnergyMeter {
 public:
  // Throws a UsageError if the device has no energy counter that can be read.
  explicit EnergyMeter(Device);
  // us: the time of one run.
  PowerUse operator()(Context&, double us, const std::function<void()>& work) const;

 private:
  std::unique_ptr<Nvml> nvml_;
};
Json to_json(const PowerUse&);  // absent values are left out

// Times reference kernels that move as few bytes as an op does. Small transfers stay below large ones' bandwidth, so a
// memory-bound op is compared with these. Each call allocates its memory and frees it.
class MemoryTimes {
 public:
  MemoryTimes(Device device, Stopwatch& stopwatch) : device_(device), stopwatch_(stopwatch) {}
  // Time for a device copy whose reads and writes sum to `bytes`, us.
  double copy_us(double bytes, Flush how = Flush::written);
  // Time for a kernel that only reads and writes this many bytes, us. Up to some 100 MB it differs from an equally
  // large copy's: the copy leaves the half that it writes in L2, where writing it back is not timed, whereas an op that
  // only reads cannot do that.
  double traffic_us(double read, double written);

 private:
  // Time for work(ctx, to, from) on buffers of these sizes, us.
  template <class Work>
  double time_us(int64_t from_bytes, int64_t to_bytes, Flush how, Work&& work);

  Device device_;
  Stopwatch& stopwatch_;
  std::map<std::pair<int64_t, Flush>, double> copies_;
  std::map<std::pair<int64_t, int64_t>, double> traffic_;
};

}  // namespace triad
