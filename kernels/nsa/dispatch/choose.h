// Which kernels take a call: one pure function per op, of the card (Context::may_use_sm90) and of the problem
// (shapes, dtypes, strides, alignment). Planning and execution switch on the same result. README.md has the table.
#pragma once
#include <vector>

#include "engine/context.h"
#include "kernels/nsa/attend.h"
#include "kernels/nsa/select.h"

namespace triad::cuda {

// Forward of the window and the compressed branch.
enum class RangeForward { portable, sm90 };
RangeForward choose_forward(const Context&, const AttendOut&, const AttendIn&);

// Forward of the selected branch.
enum class SelectedForward { portable, query_stationary, kv_stationary, shared_tile };
struct SelectedForwardChoice {
  SelectedForward kernel;
  // kv_stationary measures on the GPU how much neighbouring tokens' lists differ. Where they are alike, this kernel
  // computes every block instead.
  SelectedForward where_alike = SelectedForward::portable;
};
SelectedForwardChoice choose_forward(const Context&, const AttendOut&, const AttendIn&, const ConstTensor& block_index,
                                     int64_t l_sel);

// Backward of a branch. sm90_d64 and sm90_d128 compute dq, dk and dv in one kernel and add to dq in any order, rounded
// to the rounding unit of its row. The others compute dq, then dk and dv.
enum class Backward { portable, sm90, sm90_d64, sm90_d128 };
Backward choose_backward(const Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&);
// Whether a rounding unit is computed for dq: for all of the branches or for none, because a kernel that does not round
// would leave values in dq that are no multiples of the unit.
bool choose_rounding_unit(const Context&, const Tensor& dq, const ConstTensor& dout, const ConstTensor& q,
                          const std::vector<RoundingUnitBranch>&);

// A planning context also counts the scratch of backward without a rounding unit: it does not know how the tensors will
// be aligned, and choose_backward may then choose other kernels, with other scratch.
inline AttendGradIn without_rounding_unit(AttendGradIn grad) {
  grad.rounding_unit = {};
  return grad;
}

enum class Select { portable, sm90 };
Select choose_select(const Context&, const ConstTensor& q, const ConstTensor& k_cmp, const SelectOptions&);

}  // namespace triad::cuda
