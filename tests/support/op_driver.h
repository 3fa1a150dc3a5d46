// Runs an OpCase on a device in a dtype, in memory that reveals forbidden accesses: guard bytes surround every tensor
// and fill the padding between its rows, outputs and scratch memory start as NaN, and inputs are compared with copies
// after the run.
#pragma once
#include <span>

#include "kernels/common/op_case_args.h"

namespace triad::test {

struct RunOptions {
  Device device = Device::cpu();
  DType dtype = DType::f64;
  // The dtype to which inputs are rounded, so a run in double has a bf16 run's inputs.
  std::optional<DType> precision = {};
  int threads = 1;
  uint64_t seed = 1;
  int64_t shift = 0;  // every tensor starts this many elements past an aligned address
};

class OpRun {
 public:
  // like: if not null, a run with the same case and seed whose inputs were rounded to the same dtype (`precision`, or
  // `dtype` if that is absent). The new run copies `like`'s initial values, because drawing random numbers takes longer
  // than most ops.
  OpRun(const OpCase&, const RunOptions&, const OpRun* like = nullptr);
  OpRun(const OpRun&) = delete;

  void forward();
  void backward();
  // Runs forward, then backward if there is one, and copies every tensor to the host.
  void run();

  const std::vector<Slot>& slots() const { return slots_; }
  // Returns, after run(), slot s's values in row-major order; if the op adds to the slot, what it has added.
  std::vector<double> values(size_t s) const;
  // Returns, after run(), whether every byte equals that in another run with the same case, device and dtype.
  bool same_bits(const OpRun& other) const;
  // Returns, after run(), the forbidden accesses and unwritten elements, each with the tensor's name.
  std::vector<std::string> complaints() const;

  // Returns the address of slot s's element i in the memory that the op uses. CPU only.
  std::byte* live(size_t s, int64_t i);
  double live_value(size_t s, int64_t i) { return load_element(live(s, i), 0, dtype(s)); }
  DType dtype(size_t s) const { return dtype_in(slots_[s].type, options_.dtype); }

 private:
  // A slot's bytes: guard bytes, the shift, the rows with their padding, guard bytes.
  struct Region {
    Tensor memory;
    std::vector<std::byte> before, after;
  };
  int64_t region_bytes(const Slot&) const;
  int64_t first_byte(const Slot&) const;
  void copy_slot(size_t s, std::byte* to, const OpRun& like) const;
  DType precision() const { return options_.precision.value_or(options_.dtype); }

  const OpCase& case_;
  RunOptions options_;
  std::vector<Slot> slots_;
  std::vector<Region> regions_;
  std::unique_ptr<Runtime> runtime_;
  Args args_;
};

// |got - expected| / |expected| (Euclidean norms); infinity if an element is not finite, unless both are the same
// infinity.
double relative_error(std::span<const double> got, std::span<const double> expected);

struct GradientError {
  std::string name;  // gradient name
  int64_t elements;  // checked elements
  double error;      // relative error over these elements
};
// Compares backward with forward's central differences, in double on the CPU.
std::vector<GradientError> gradient_errors(const OpCase&, uint64_t seed = 1);

}  // namespace triad::test
