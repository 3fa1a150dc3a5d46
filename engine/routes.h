// Which kernel is wanted for an op that has several, which one took each call and for which shape, and how often it was
// not the one meant: a fallback, which has a reason. Filled in where the choice is made, while work is queued; no
// kernel runs for it. A CUDA graph's replays are not seen: counts are of calls.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tensor.h"

namespace triad {

// runtime.kernels. automatic: the fused kernels where there are some for the shape; where bf16 on sm_90 has none that
// is a fallback. fused: the same, and a fallback wherever it is not a fused kernel, on the CPU too. general: the
// kernels that any card runs and any shape takes. reference: the CPU's formulas with nothing rounded in between: on a
// GPU the general kernels in fp32, on operands widened to fp32, rounded once at the end. The CPU has one route, its
// reference: automatic, general and reference all mean it.
enum class KernelChoice { automatic, fused, general, reference };
struct KernelChoices {
  KernelChoice cmp = KernelChoice::automatic, sel = cmp, win = cmp, matmul = cmp;
  static KernelChoices all(KernelChoice choice) { return {choice, choice, choice, choice}; }
  bool fused_branches() const;  // none of the branches is to have another kernel
  friend bool operator==(const KernelChoices&, const KernelChoices&) = default;
};

class Routes {
 public:
  explicit Routes(const KernelChoices& wanted = {}, bool strict = false) : wanted_(wanted), strict_(strict) {}

  struct Count {
    int64_t layer;                   // -1 outside of the layers
    std::string op, kernel, reason;  // reason: empty where this is the kernel meant for the call
    DType dtype;
    Shape first, second;  // the operands that the choice depends on: q and k; of a product its result and left operand
    int64_t calls;
    bool is_fallback() const { return !reason.empty(); }
    std::string shapes() const;  // "bf16 [2,128,12,64] [2,128,2,64]"
  };

  const KernelChoices& wanted() const { return wanted_; }
  KernelChoice wanted(std::string_view op) const;
  // The operands of the calls recorded from now on.
  void set_call(const ConstTensor& first, const ConstTensor& second);
  // Strict: a fallback is an Error that names op, shape and reason.
  void record(std::string_view op, std::string_view kernel, std::string_view reason = {});
  void set_layer(int64_t layer) { layer_ = layer; }  // of the calls that follow
  int64_t layer() const { return layer_; }

  const std::vector<Count>& counts() const { return counts_; }  // in the order of their first call
  int64_t fallbacks() const;
  int64_t fallbacks(std::string_view branch) const;  // of one of branch_of()
  // "3 fallbacks: nsa_select general (heads of 60) 3 times", all layers together; "no fallbacks".
  std::string summary() const;

 private:
  KernelChoices wanted_;
  bool strict_;
  int64_t layer_ = -1;
  DType dtype_ = DType::f32;
  Shape first_, second_;
  std::vector<Count> counts_;
  size_t next_ = 0;  // where the next call is likely found: steps repeat their calls
};

// The branch of NSA that an op belongs to, by its name: cmp, sel, win, select (the scores and the top-n), else the op.
std::string branch_of(std::string_view op);

}  // namespace triad
