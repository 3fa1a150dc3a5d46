// Which kernels compute a call: one pure function per op. It depends on the card (Context::may_use_sm90), the problem
// (shapes, dtypes, strides, alignment) and whether candidates are requested (KernelChoice). Planning and execution
// switch on the same result. README.md has the table.
// Backward::sm90's two kernels are not chosen for a part of a row (RowPart).
#pragma once
#include <optional>
#include <vector>

#include "engine/context.h"
#include "kernels/nsa/attend.h"
#include "kernels/nsa/index.h"
#include "kernels/nsa/select.h"

namespace triad::cuda {

// Forward for the window branch, the compressed branch and dense attention.
enum class RangeForward { portable, sm90 };
RangeForward choose_forward(const Context&, const AttendOut&, const AttendIn&);

// Forward for the selected branch.
enum class SelectedForward { portable, query_stationary, kv_stationary, shared_tile, resident_rows };
struct SelectedForwardChoice {
  SelectedForward kernel;
  // For kv_stationary, which first measures on the GPU how much neighbouring tokens' lists differ: the kernel that
  // computes the call instead if they are alike.
  std::optional<SelectedForward> where_alike = {};
};
SelectedForwardChoice choose_forward(const Context&, const AttendOut&, const AttendIn&, const ConstTensor& block_index,
                                     int64_t l_sel);

// Backward for a branch or dense attention. sm90_d64, sm90_d128 and portable_dq_dk_dv compute dq, dk and dv in one
// kernel; its CTAs add to dq in any order, in multiples of the row's rounding unit. The others compute dq, then dk and
// dv.
enum class Backward { portable, portable_dq_dk_dv, sm90, sm90_d64, sm90_d128 };
Backward choose_backward(const Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&);
// Whether backward has a rounding unit for dq (attend_rounding_unit in nsa/attend.h). It applies to all branches or
// none, because a kernel that doesn't round would leave values in dq that are no multiples of the unit.
bool choose_rounding_unit(const Tensor& dq, const ConstTensor& dout, const ConstTensor& q,
                          const std::vector<RoundingUnitBranch>&);

// Returns grad without its rounding unit. A planning context plans backward with and without it and reserves the
// larger scratch: it does not know how the tensors will be aligned, and choose_backward may choose other kernels in
// the run.
inline AttendGradIn without_rounding_unit(AttendGradIn grad) {
  grad.rounding_unit = {};
  return grad;
}

// The selection.
enum class Select { portable, sm90 };
Select choose_select(const Context&, const ConstTensor& q, const ConstTensor& k_cmp, const SelectOptions&,
                     const Documents&);

// A taught index: its selection, the student's lse, and its loss and gradients.
enum class Index { portable, sm90 };
Index choose_select_index(const Context&, const ConstTensor& iq, const ConstTensor& ik, const SelectOptions&);
Index choose_index_forward(const Context&, const IndexForward&, const ConstTensor& block_index, int64_t l_sel);
Index choose_index_backward(const Context&, const IndexBackward&, const AttendIn&, const ConstTensor& block_index,
                            int64_t l_sel);

// The chosen kernels' name in the route record (engine/routes.h), which the log and `triad bench` print: the
// enumerator's, or nullptr for the portable kernels.
const char* fused_name(RangeForward);
const char* fused_name(const SelectedForwardChoice&);
const char* fused_name(Backward);
const char* fused_name(Select);
const char* fused_name(Index);

}  // namespace triad::cuda
