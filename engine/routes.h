// Routes: which kernel is requested for each op (runtime.kernels), which kernel took each call and for which shape, and
// how many calls were fallbacks, with the reason. Ops record their choice on the host when they queue work, so replays
// of a CUDA graph are not counted.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tensor.h"

namespace triad {

// The values of runtime.kernels. "fused" names the sm_90 kernels of an op.
// automatic: the fused kernel if there is one for the shape, else the general one; for bf16 on sm_90 the latter is a
// fallback.
// fused: as automatic, but every call without a fused kernel is a fallback, on the CPU too.
// general: kernels for any card and any shape.
// reference: the CPU reference without intermediate rounding; on a GPU the general kernels in fp32 on operands upcast
// to fp32, with one rounding at the end.
// The CPU has one route, the reference, which automatic and general select too.
enum class KernelChoice { automatic, fused, general, reference };
struct KernelChoices {
  KernelChoice cmp = KernelChoice::automatic, sel = cmp, win = cmp, matmul = cmp;
  static KernelChoices all(KernelChoice choice) { return {choice, choice, choice, choice}; }
  bool fused_branches() const;  // all three branches are automatic or fused
  friend bool operator==(const KernelChoices&, const KernelChoices&) = default;
};

class Routes {
 public:
  explicit Routes(const KernelChoices& wanted = {}, bool strict = false) : wanted_(wanted), strict_(strict) {}

  struct Count {
    int64_t layer;                   // -1: outside the layers
    std::string op, kernel, reason;  // reason: why it is a fallback; empty: it is none
    DType dtype;
    Shape first, second;  // q and k, or a matrix product's result and left operand
    int64_t calls;
    bool is_fallback() const { return !reason.empty(); }
    std::string shapes() const;  // "bf16 [2,128,12,64] [2,128,2,64]"
  };

  const KernelChoices& wanted() const { return wanted_; }
  KernelChoice wanted(std::string_view op) const;
  // Sets the operands of the calls recorded from now on.
  void set_call(const ConstTensor& first, const ConstTensor& second);
  // Counts a call. If strict, a fallback throws an Error with op, shape and reason.
  void record(std::string_view op, std::string_view kernel, std::string_view reason = {});
  void set_layer(int64_t layer) { layer_ = layer; }  // layer of the calls recorded from now on
  int64_t layer() const { return layer_; }

  const std::vector<Count>& counts() const { return counts_; }  // in the order of first calls
  int64_t fallbacks() const;
  int64_t fallbacks(std::string_view branch) const;  // branch: a value of branch_of()
  // Summed over layers: "3 fallbacks: nsa_select general (heads of 60) 3 times", or "no fallbacks".
  std::string summary() const;

 private:
  KernelChoices wanted_;
  bool strict_;
  int64_t layer_ = -1;
  DType dtype_ = DType::f32;
  Shape first_, second_;
  std::vector<Count> counts_;
  size_t next_ = 0;  // guess of the next call's entry, since every step makes the same calls
};

// The NSA branch that an op belongs to: cmp, sel, win or select (scores and top-n); any other op's own name.
std::string branch_of(std::string_view op);

}  // namespace triad
