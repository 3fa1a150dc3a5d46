// OpCase: one op at one shape. The test driver checks it (backward against central differences in double; devices,
// dtypes and repeated runs against each other), `triad bench` times it, and it is an example of how to call the op.
// Each kernels/*/*_cases.cpp returns a table of them.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/context.h"

namespace triad {

// The role of an argument. It decides how the driver fills and checks the argument.
enum class ArgRole {
  input,      // activation in the case's dtype; its gradient d<name> (same dtype) is overwritten
  input_acc,  // activation in the case's dtype; its gradient d<name> has the acc dtype and is added to
  param,      // weight in the case's dtype; its gradient d<name> has the acc dtype and is added to
  constant,   // no gradient: i32 indices, or values that backward treats as fixed
  output,     // written by forward; its upstream gradient d<name> (same dtype) is drawn with this arg's std, mean, fill
  saved,      // written by forward and read by backward; has no gradient of its own
};

enum class ArgType { element, acc, i32, f64 };  // element: the dtype of the run; acc: f64 for f64, else f32

// The arguments of a case by name; gradients are called d<name>. An absent tensor is empty().
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
  double std = 1.0;  // of N(mean, std), for floats without `fill`
  double mean = 0.0;
  int64_t row_pad = 0;  // extra elements after each innermost row: a strided view
  // Values by row-major index, for integers and special inputs; the seed differs between runs.
  std::function<double(int64_t index, uint64_t seed)> fill = nullptr;
  // Whole-array form of `fill`, for values that depend on each other (sorted lists, say).
  std::function<std::vector<double>(uint64_t seed)> fill_all = nullptr;
};

struct OpCase {
  std::string op;    // "rmsnorm"
  std::string name;  // "7x33", unique within the op
  std::vector<Arg> args = {};
  std::function<void(Context&, const Args&)> forward = nullptr;
  std::function<void(Context&, const Args&)> backward = nullptr;  // null: the op has no gradient
  // For the bench: floating-point operations and bytes of one call, with each input read once and each output written
  // once. Bytes are for 2-byte elements (bf16); the f32 bench doubles them.
  double forward_flops = 0, forward_bytes = 0, backward_flops = 0, backward_bytes = 0;
  // How many of forward_bytes and backward_bytes are written; by default half, as in a copy.
  static constexpr double kHalf = -1;
  double forward_written = kHalf, backward_written = kHalf;
  bool bench = false;       // large: timed by `triad bench`, checked on the GPU only
  bool differences = true;  // false: too large for central differences, which smaller cases cover
  bool gpu_f32 = true, gpu_bf16 = true;
  // Largest relative L2 error over an output or gradient: CUDA f32 against the CPU in f32.
  double f32_tolerance = 1e-5;
};

// The cases of all ops, in the order of CMakeLists.txt's list of ops, which generates this function.
std::vector<OpCase> all_op_cases();

}  // namespace triad
