// Runs one OpCase on one device in one dtype, in memory that notices what an op must not do: guard bytes lie around
// every tensor and in the padding of its rows, what must be overwritten starts as NaN, scratch too, and what must not
// change is compared.
#pragma once
#include <span>

#include "kernels/common/op_case_args.h"

namespace triad::test {

struct RunOptions {
  Device device = Device::cpu();
  DType dtype = DType::f64;
  // Inputs are rounded to what a run in this dtype would hold: the double run that a bf16 run is compared with.
  std::optional<DType> precision = {};
  int threads = 1;
  uint64_t seed = 1;
  int64_t shift = 0;  // every tensor starts this many elements past an aligned address
};

class OpRun {
 public:
  OpRun(const OpCase&, const RunOptions&);
  OpRun(const OpRun&) = delete;

  void forward();
  void backward();
  // Both (backward where there is one), then fetches every tensor to the host.
  void run();

  const std::vector<Slot>& slots() const { return slots_; }
  // After run(): the values of slot s in row-major order; of one that is added to, what was added.
  std::vector<double> values(size_t s) const;
  // After run(): whether every byte is that of another run of the same case, device and dtype.
  bool same_bits(const OpRun& other) const;
  // After run(): what the op should not have done, each with the tensor's name.
  std::vector<std::string> complaints() const;

  // On the CPU, at any time: element i of slot s where the op finds it.
  std::byte* live(size_t s, int64_t i);
  double live_value(size_t s, int64_t i) { return load_element(live(s, i), 0, dtype(s)); }
  DType dtype(size_t s) const { return dtype_in(slots_[s].type, options_.dtype); }

 private:
  // guard | shift | rows, each followed by its padding | guard, as bytes.
  struct Region {
    Tensor memory;
    std::vector<std::byte> before, after;
  };
  int64_t region_bytes(const Slot&) const;
  int64_t first_byte(const Slot&) const;

  const OpCase& case_;
  RunOptions options_;
  std::vector<Slot> slots_;
  std::vector<Region> regions_;
  std::unique_ptr<Runtime> runtime_;
  Args args_;
};

// |got - want| / |want| over all elements; equal infinities count as equal, any other non-finite value as infinitely
// wrong.
double relative_error(std::span<const double> got, std::span<const double> want);

struct GradientError {
  std::string name;  // of the gradient
  int64_t elements;  // how many were checked
  double error;      // relative, over them
};
// Backward against central differences of forward, in double on the CPU.
std::vector<GradientError> gradient_errors(const OpCase&, uint64_t seed = 1);

}  // namespace triad::test
