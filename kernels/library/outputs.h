// Chooses the tensors that a call's ops write: the caller's, or, if the kernels cannot write those, tensors in scratch,
// which finish() converts to the caller's.
#pragma once
#include <array>
#include <vector>

#include "kernels/library/library.h"
#include "kernels/library/scale.h"
#include "kernels/nsa/branch_sum.h"

namespace triad::library {

// Returns q, or, if the caller's scale is not the ops', a copy in scratch that is multiplied accordingly.
inline ConstTensor scaled(const Call& call, ConstTensor q, Scratch::Scope& scope) {
  const double factor = call.options.factor(q.size(3));
  if (factor == 1) return q;
  const Tensor to = scope.alloc(q.dtype, q.shape());
  scale(call.ctx, to, q, factor);
  return to;
}

class Outputs {
 public:
  Outputs(Call& call, Scratch::Scope& scope) : call_(call), scope_(scope) {}

  // Returns a tensor in this dtype for the ops to write: the caller's tensor `wanted` if the kernels can write it, else
  // one in scratch. wanted may be absent.
  Tensor target(const Tensor& wanted, DType dtype, const Shape& shape) {
    if (!wanted.empty() && wanted.dtype == dtype && rows_aligned(wanted)) return wanted;
    return in_scratch(wanted, dtype, shape, 1);
  }
  // The same for dq, which the ops need contiguous and in acc; finish() multiplies it by factor.
  Tensor target_dq(const Tensor& wanted, DType acc, const Shape& shape, double factor) {
    if (!wanted.empty() && wanted.dtype == acc && wanted.contiguous() && rows_aligned(wanted) && factor == 1)
      return wanted;
    return in_scratch(wanted, acc, shape, factor);
  }
  // Returns tensors for the three branches' gradients when keys or values are shared: column blocks in one tensor [B*T,
  // 3*W] of the element type. finish() writes their sum to `wanted`. zero_first: sets them to 0.
  std::array<Tensor, 3> shared(const Tensor& wanted, DType type, const Shape& shape, bool zero_first) {
    const int64_t N = shape[0] * shape[1], W = shape[2] * shape[3];
    const Tensor parts = scope_.alloc(type, {N, 3 * W});
    if (zero_first) zero(call_.ctx, parts);
    std::array<Tensor, 3> to;
    for (int i = 0; i < 3; ++i) {
      to[i] = Tensor(parts.data + i * W * size_of(type), type, shape, parts.device);
      to[i].stride = {shape[1] * 3 * W, 3 * W, shape[3], 1};
    }
    if (!wanted.empty()) {
      const bool direct = wanted.dtype == type && wanted.contiguous();
      const Tensor sum = direct ? wanted : in_scratch(wanted, type, shape, 1);
      sums_.push_back({sum.view({N, W}), parts});
    }
    return to;
  }
  // Queues the sums and conversions, after the ops.
  void finish() {
    for (const Sum& s : sums_) branch_sum(call_.ctx, s.to, s.parts);
    for (const Conversion& c : conversions_) scale(call_.ctx, c.to, c.from, c.factor);
  }

 private:
  Tensor in_scratch(const Tensor& wanted, DType dtype, const Shape& shape, double factor) {
    const Tensor t = scope_.alloc(dtype, shape);
    if (!wanted.empty()) conversions_.push_back({wanted, t, factor});
    return t;
  }
  // Whether every row is aligned to 16 bytes, which the kernels' stores need on a GPU. Call::tensor has checked the
  // first row.
  bool rows_aligned(const Tensor& t) const {
    if (!call_.ctx.device.is_cuda()) return true;
    bool aligned = true;
    for (int i = 0; i < 3; ++i) aligned = aligned && (t.dim[i] <= 1 || t.stride[i] * size_of(t.dtype) % 16 == 0);
    return aligned;
  }
  struct Conversion {
    Tensor to, from;
    double factor;
  };
  struct Sum {
    Tensor to, parts;
  };
  Call& call_;
  Scratch::Scope& scope_;
  std::vector<Conversion> conversions_;
  std::vector<Sum> sums_;
};

}  // namespace triad::library
