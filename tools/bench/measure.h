// How `triad bench` measures: medians by events with a cold L2 cache, and what this machine can do at best: the
// bandwidth of a device copy and the rate of a large matrix product.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "engine/context.h"

namespace triad {

double median(std::vector<double> values);

struct Timing {
  double us = 0;  // median
  int runs = 0;
};

// What fills the L2 cache before a run: other data that were written, as behind a kernel that wrote as much; or, behind
// those, read. Lines that were written must go to memory before others take their place, on the time of whoever brings
// these, and he who only reads must bring more of them than a copy of as many bytes: what is to be set against a copy
// fairly is both behind `read`, where either begins with a cache that holds nothing of its own and owes nothing. One
// H200, 50 MB in all, us: copied 18.5 behind written data and 16.1 behind read ones, read 21.4 and 16.5.
enum class Flush { written, read };

// Times work on a context's stream. On a GPU the L2 cache is flushed before every run, and runs are queued without
// waiting, so that the host's launches hide behind the device's work.
class Stopwatch {
 public:
  explicit Stopwatch(Device device);

  template <class Work>
  Timing operator()(Context& ctx, Work&& work, Flush how = Flush::written) {
    return device_.is_cuda() ? time_gpu(ctx, work, how) : time_cpu(ctx, work);
  }

 private:
  template <class Work>
  static double once_us(Context& ctx, Work& work) {
    Event begin(ctx.device, true), end(ctx.device, true);
    begin.record(ctx.stream);
    work();
    end.record(ctx.stream);
    if (ctx.device.is_cuda()) end.synchronize();
    return end.ms_since(begin) * 1e3;
  }

  // 31 runs, or those that fit into a second, 15 at least, after three that warm up.
  template <class Work>
  Timing time_gpu(Context& ctx, Work& work, Flush how) {
    constexpr int kWarmUps = 3;
    constexpr double kBudgetUs = 1e6;
    for (int i = 1; i < kWarmUps; ++i) work();
    const int runs = static_cast<int>(std::clamp(kBudgetUs / once_us(ctx, work), 15.0, 31.0));
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

  // As many runs as fit into two seconds, 15 at most, after one that warms up.
  template <class Work>
  static Timing time_cpu(Context& ctx, Work& work) {
    constexpr double kBudgetUs = 2e6;
    const int runs = static_cast<int>(std::clamp(kBudgetUs / std::max(once_us(ctx, work), 1.0), 1.0, 15.0));
    std::vector<double> us;
    for (int i = 0; i < runs; ++i) us.push_back(once_us(ctx, work));
    return {median(us), runs};
  }

  void flush(Context& ctx, int run, Flush how);

  Device device_;
  std::unique_ptr<Arena> flush_;
  Tensor flush_memory_;
};

struct Ceiling {
  double gb_per_s = 0;     // of a copy of 1 GiB (CPU: 256 MiB), read and written bytes
  double tflop_per_s = 0;  // of a product of 8192^3 (CPU: 1024^3), of random numbers

  // The least time that this work takes at these rates.
  double floor_us(double flops, double bytes) const {
    return std::max(flops / tflop_per_s * 1e-6, bytes / gb_per_s * 1e-3);
  }
};
Ceiling measure_ceiling(Device, DType, Stopwatch&);

// Few bytes go at less than the ceiling: what a memory-bound op is to be set against. Memory is allocated where it is
// asked for, and given back.
class MemoryTimes {
 public:
  MemoryTimes(Device device, Stopwatch& stopwatch) : device_(device), stopwatch_(stopwatch) {}
  // Of the device's copy that reads and writes this many bytes in all.
  double copy_us(double bytes, Flush how = Flush::written);
  // Of a kernel that does nothing but read and write as many bytes as an op does, which need not be halves. Up to some
  // 100 MB it makes a difference: half of what a copy moves it leaves in L2, to be written back when nobody measures,
  // and an op that only reads has no such half. One H200, 50 MB in all, us: copied 18.5, read 21.4.
  double traffic_us(double read, double written);

 private:
  // Of work(ctx, to, from), with memory for as many bytes of each.
  template <class Work>
  double time_us(int64_t from_bytes, int64_t to_bytes, Flush how, Work&& work);

  Device device_;
  Stopwatch& stopwatch_;
  std::map<std::pair<int64_t, Flush>, double> copies_;
  std::map<std::pair<int64_t, int64_t>, double> traffic_;
};

}  // namespace triad
