// OpCase: one op at one shape. The test driver checks it (backward against central differences in double; devices,
// dtypes and repeated runs against each other), `triad bench` times it, and it shows how to call the op. Each
// kernels/*/cases/*_cases.cpp returns a table of cases.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/context.h"

namespace triad {

// An argument's role decides how the driver fills and checks it.
enum class ArgRole {
  input,      // activation in the case's dtype; its gradient d<name> (same dtype) is overwritten
  input_acc,  // activation in the case's dtype; its gradient d<name> has the acc dtype and is added to
  param,      // weight in the case's dtype; its gradient d<name> has the acc dtype and is added to
  constant,   // no gradient: i32 indices, or values that backward treats as fixed
  output,     // written by forward; its upstream gradient d<name> (same dtype) is an input to backward, filled like the
              // argument
  saved,      // written by forward and read by backward; has no gradient
};

enum class ArgType { element, acc, i32, f64 };  // element: the dtype under test; acc: f64 for f64, else f32

// A case's tensors by name; the gradient of x is called dx. A tensor that the case does not have is empty().
class Args {
 public:
  Tensor operator[](const std::string& name) const {
    const auto it = tensors_.find(name);
    return it == tensors_.end() ? Tensor{} : it->second;
  }
  void set(const std::string& name, Tensor t) { tensors_[name] = t; }

 private:
  std::map<std::string, Tensor> tensors_;
};

struct Arg {
  std::string name;
  ArgRole role;
  Shape shape;
  ArgType type = ArgType::element;
  double std = 1.0;  // values are drawn from N(mean, std) unless `fill` or `fill_all` is set
  double mean = 0.0;
  int64_t row_pad = 0;  // extra elements after each innermost row, to test strided views
  // The value at this row-major index, for integers and special inputs. Each pass has a different seed.
  std::function<double(int64_t index, uint64_t seed)> fill = nullptr;
  // As `fill`, but returns all elements at once, for values that depend on each other (sorted lists, for example).
  std::function<std::vector<double>(uint64_t seed)> fill_all = nullptr;
};

struct OpCase {
  std::string op;    // "rmsnorm"
  std::string name;  // "7x33", unique within the op
  std::vector<Arg> args = {};
  std::function<void(Context&, const Args&)> forward = nullptr;
  std::function<void(Context&, const Args&)> backward = nullptr;  // null: the op has no gradient
  // For `triad bench`: floating-point operations and bytes per call, with each input read once and each output written
  // once. Bytes are for 2-byte elements (bf16); in f32 the bench doubles them.
  double forward_flops = 0, forward_bytes = 0, backward_flops = 0, backward_bytes = 0;
  // How many forward_bytes and backward_bytes are written; by default half, as in a copy.
  static constexpr double kHalf = -1;
  double forward_written = kHalf, backward_written = kHalf;
  bool bench = false;       // a large shape: timed by `triad bench` and checked on the GPU only
  bool differences = true;  // false: too large for central differences; smaller cases check the gradient
  bool cpu = true;          // false: too slow for the CPU-only tests; the GPU is compared with the CPU
  bool gpu_f32 = true, gpu_bf16 = true;
  KernelChoices kernels = {};  // kernel choices while the case runs; for candidates
  // The largest allowed relative L2 error in f32 of an output or gradient, GPU against CPU.
  double f32_tolerance = 1e-5;
};

// All ops' cases, ordered as the list `ops` in CMakeLists.txt, which generates this function.
std::vector<OpCase> all_op_cases();

}  // namespace triad
