// Routes: which kernel the config requests for each op (runtime.kernels), which kernel ran each call and for which
// shape, and how many calls were fallbacks, with the reason. Ops record the kernel on the host when they queue work, so
// replays of a CUDA graph are not counted.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tensor.h"

namespace triad {

// runtime.kernels' values, and candidate. A fused kernel is one for sm_90, a general kernel one for any card.
//   automatic  the fused kernel if there is one for the shape, else the general one, which counts as a fallback for
//              bf16 on sm_90
//   fused      as automatic, but every call without a fused kernel counts as a fallback, on the CPU too
//   general    the general kernel
//   reference  the general kernel on operands upcast to fp32, with one rounding at the end; on the CPU the reference
//              without intermediate rounding
//   candidate  as automatic, but a fused kernel that automatic chooses for few shapes or none is chosen wherever it
//              supports the shape, so that tests reach it with small problems. Tests and benches request it; a config
//              cannot
// The CPU has only the reference, which automatic and general select too.
enum class KernelChoice { automatic, fused, general, reference, candidate };
// One value for each branch and for matrix products. Dense attention has the window branch's.
struct KernelChoices {
  KernelChoice cmp = KernelChoice::automatic, sel = cmp, win = cmp, matmul = cmp;
  static KernelChoices all(KernelChoice choice) { return {choice, choice, choice, choice}; }
  bool any_branch_is_reference() const;
  friend bool operator==(const KernelChoices&, const KernelChoices&) = default;
};

// The name under which ops record their kernels for any card and shape.
inline constexpr const char* kGeneralKernel = "general";

class Routes {
 public:
  explicit Routes(const KernelChoices& wanted = {}, bool strict = false) : wanted_(wanted), strict_(strict) {}

  struct Count {
    int64_t layer;                   // layer number; -1: outside the layers
    std::string op, kernel, reason;  // reason: why the call is a fallback; empty: it is not one
    DType dtype;
    Shape first, second;  // shapes: q and k, or a matrix product's result and left operand
    int64_t calls;
    bool is_fallback() const { return !reason.empty(); }
    std::string shapes() const;  // "bf16 [2,128,12,64] [2,128,2,64]"
  };

  const KernelChoices& wanted() const { return wanted_; }
  KernelChoice wanted(std::string_view op) const;
  // Sets the operands whose shapes the next record() calls count.
  void set_call(const ConstTensor& first, const ConstTensor& second);
  // Counts one call of `op` by `kernel`: kGeneralKernel, "cpu", or the name of a faster one. A reason makes it a
  // fallback. If strict, a fallback throws an Error with op, shape and reason.
  void record(std::string_view op, std::string_view kernel, std::string_view reason = {});
  void set_layer(int64_t layer) { layer_ = layer; }  // layer of the calls recorded from now on
  int64_t layer() const { return layer_; }

  const std::vector<Count>& counts() const { return counts_; }  // order: by first call
  // How many entries record() has looked at so far: a few per call, however many layers a model has.
  int64_t looks() const { return looks_; }
  int64_t fallbacks() const;
  int64_t fallbacks(std::string_view branch) const;  // branch: a value of branch_of()
  // Summed over layers: "3 fallbacks: nsa_select general (heads of 60) 3 times", or "no fallbacks".
  std::string summary() const;

 private:
  size_t find(std::string_view op, std::string_view kernel, std::string_view reason);

  KernelChoices wanted_;
  bool strict_;
  int64_t layer_ = -1;
  DType dtype_ = DType::f32;
  Shape first_, second_;
  std::vector<Count> counts_;
  std::vector<std::vector<size_t>> layer_entries_;  // [layer + 1]: indices of the layer's entries
  int64_t looks_ = 0;
};

// The attention branch that an op belongs to: cmp, sel, win (for dense attention too) or select (scores and top-n). For
// any other op, its own name.
std::string branch_of(std::string_view op);

}  // namespace triad
