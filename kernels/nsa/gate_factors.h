// Gates that a caller gives as factors, [B,T,H,3] in the order cmp, sel, win: one per group (H = Hkv) or per query head
// (H = Hq). The other ops have gates as planes, [3,B,T,H] (nsa/gate.h).
#pragma once
#include <array>

#include "engine/context.h"
#include "kernels/nsa/compress.h"

namespace triad {

// gate [3,B,T,H] acc, contiguous, overwritten  <-  factors [B,T,H,3], T or acc, any strides; absent: 1/3 each
void nsa_gate_factors_forward(Context&, Tensor gate, ConstTensor factors);
// dfactors [B,T,H,3], T or acc, any strides, overwritten  <-  dgate [3,B,T,H] acc, contiguous
void nsa_gate_factors_backward(Context&, Tensor dfactors, ConstTensor dgate);

// gated: three branches, each [B,T,Hq,dv] T, overwritten; an absent one is skipped  <-  dout [B,T,Hq,dv] T, gate
// [3,B,T,H] acc, contiguous, H a divisor of Hq
//   gated_b[t,h] = gate_b[t, h / (Hq/H)] * dout[t,h], rounded to T: branch b's output gradient
// bounds [3,B,T,Hkv] acc, contiguous, if given, is overwritten with the largest |gate| among the group's heads,
// increased by 1/64, which covers the rounding: |gated_b[t,h]| <= bounds_b[t,g(h)] * |dout[t,h]|. For
// attend_rounding_unit.
void nsa_gate_dout(Context&, const std::array<Tensor, 3>& gated, Tensor bounds, ConstTensor dout, ConstTensor gate);
// The factor by which bounds exceed the gates.
inline constexpr double kGateBoundSlack = 1.0 + 1.0 / 64;
// y[0], y[1] overwritten  <-  x[0], x[1], as nsa_compress_forward with phi avg; gate  <-  factors, as above. For keys,
// values and gates that forward needs first: one kernel computes them, where launches take longer than kernels.
void nsa_averages_and_gates(Context&, const std::array<Tensor, 2>& y, const std::array<ConstTensor, 2>& x,
                            const CompressionBlocks&, Tensor gate, ConstTensor factors,
                            const Documents& documents = {});
// Throws, with the op's name, unless gate and factors fit nsa_gate_factors_forward.
void check_gate_factors(const char* op, const ConstTensor& gate, const ConstTensor& factors);

namespace cuda {
void nsa_gate_factors_forward(Context&, Tensor gate, ConstTensor factors);
void nsa_gate_factors_backward(Context&, Tensor dfactors, ConstTensor dgate);
void nsa_gate_dout(Context&, const std::array<Tensor, 3>& gated, Tensor bounds, ConstTensor dout, ConstTensor gate);
// Returns false, and queues nothing, if the two need kernels with different vector lengths, or the gates are too many.
bool averages_and_gates(Context&, const std::array<Tensor, 2>& y, const std::array<ConstTensor, 2>& x,
                        const CompressionBlocks&, const Tensor& gate, const ConstTensor& factors, const Documents&);
}  // namespace cuda
}  // namespace triad
