#include "kernels/nsa/dispatch/choose.h"

#include "kernels/nsa/gpu/rounding_unit.h"
#include "kernels/nsa/sm90/launch_forward.h"
#include "kernels/nsa/sm90/launch_index.h"
#include "kernels/nsa/sm90/launch_select.h"

namespace triad::cuda {
namespace {

constexpr int64_t k31Bits = int64_t{1} << 31;

// Whether a tensor is bf16, its rows begin at multiples of 16 bytes, and its strides within a sequence fit 31 bits.
bool rows_fit(const ConstTensor& t) {
  bool fits = t.dtype == DType::bf16 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (int i = 0; i < 3; ++i)
    fits = fits && (t.size(i) <= 1 || t.stride[i] % 8 == 0) && (i == 0 || t.stride[i] < k31Bits);
  return fits;
}

// Whether every offset within a sequence, counted in units of `unit` elements, fits 31 bits.
bool sequence_fits(const ConstTensor& t, int64_t unit) { return t.size(1) * t.stride[1] / unit < k31Bits; }

// Whether the first element is aligned to `bytes` bytes and every stride is a multiple of `elements`.
bool is_aligned_to(const Tensor& t, int bytes, int elements) {
  bool fits = reinterpret_cast<uintptr_t>(t.data) % bytes == 0;
  for (int i = 0; i < 3; ++i) fits = fits && (t.size(i) <= 1 || t.stride[i] % elements == 0);
  return fits;
}

// Whether a kernel that computes dq, dk and dv together supports the branch: bf16, heads (dk, dv) = (64, 64) or
// (128, 128), and dq aligned such that four columns can be added to at a time.
bool fits_one_kernel(const Tensor& dq, const ConstTensor& dout, const ConstTensor& q, const ConstTensor& k,
                     const ConstTensor& v) {
  const int64_t dk = q.size(3);
  bool fits = (dk == 64 || dk == 128) && dout.size(3) == dk && reinterpret_cast<uintptr_t>(dq.data) % 16 == 0;
  for (int i = 0; i < 3; ++i) fits = fits && dq.stride[i] % 4 == 0;
  for (const ConstTensor& t : {q, dout, ConstTensor(dq)}) fits = fits && sequence_fits(t, 4);
  return fits && rows_fit(q) && rows_fit(dout) && rows_fit(k) && rows_fit(v);
}

// Whether the two Hopper kernels, one for dq and one for dk and dv (Backward::sm90), support the branch: bf16, the head
// widths below, and dq aligned such that two columns can be accessed at a time.
bool fits_two_kernels(const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in) {
  const int64_t dk = in.q.size(3), dv = in.v.size(3);
  bool fits = ((dk == 64 && dv == 64) || (dk == 128 && dv == 128) || (dk == 192 && dv == 128)) &&
              reinterpret_cast<uintptr_t>(out.dq.data) % 8 == 0;
  for (int i = 0; i < 3; ++i) fits = fits && out.dq.stride[i] % 2 == 0;
  return fits && rows_fit(in.q) && rows_fit(in.k) && rows_fit(in.v) && rows_fit(grad.dout) && sequence_fits(in.q, 8) &&
         sequence_fits(grad.dout, 8);
}

}  // namespace

RangeForward choose_forward(const Context& ctx, const AttendOut& out, const AttendIn& in) {
  return ctx.may_use_sm90() && forward_sm90_supports(out, in) ? RangeForward::sm90 : RangeForward::portable;
}

SelectedForwardChoice choose_forward(const Context& ctx, const AttendOut& out, const AttendIn& in,
                                     const ConstTensor& block_index, int64_t l_sel) {
  using enum SelectedForward;
  if (!ctx.may_use_sm90()) return {portable};
  const bool candidate = ctx.routes.wanted("nsa_attend_selected_forward") == KernelChoice::candidate;
  if (resident_rows_supports(out, in, block_index, l_sel) && (candidate || resident_rows_pays(in, block_index, l_sel)))
    return {resident_rows};
  const bool query = query_stationary_supports(out, in, block_index, l_sel);
  if (query && query_stationary_pays(in, block_index, l_sel)) return {query_stationary};
  const bool kv = kv_stationary_supports(out, in, block_index, l_sel) && kv_stationary_pays(in, block_index, l_sel);
  const bool tile = shared_tile_supports(out, in, l_sel, /*long_documents_elsewhere=*/kv);
  if (!tile && !query) return {portable};
  const SelectedForward other = tile ? shared_tile : query_stationary;
  if (!kv) return {other};
  return {kv_stationary, other};
}

Backward choose_backward(const Context& ctx, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in) {
  if (!grad.rounding_unit.empty() && fits_one_kernel(out.dq, grad.dout, in.q, in.k, in.v)) {
    if (!ctx.may_use_sm90()) return Backward::portable_dq_dk_dv;
    if (in.q.size(3) == 64) return Backward::sm90_d64;
    // sm90_d128 stores dk and dv two columns at a time, both in one dtype. Where it cannot, the portable kernel runs.
    // Backward::sm90's two kernels must not run: they don't round what they add to dq, and a dq with a rounding unit
    // needs rounded terms from every branch. A plan does not reserve the portable kernel's scratch here, because an
    // arena aligns the dk and dv that it allocates.
    const bool fits_d128 = is_aligned_to(out.dk, 8, 2) && is_aligned_to(out.dv, 8, 2) && out.dk.dtype == out.dv.dtype;
    return fits_d128 ? Backward::sm90_d128 : Backward::portable_dq_dk_dv;
  }
  if (!ctx.may_use_sm90()) return Backward::portable;
  return in.documents.part.whole() && fits_two_kernels(out, grad, in) ? Backward::sm90 : Backward::portable;
}

bool choose_rounding_unit(const Tensor& dq, const ConstTensor& dout, const ConstTensor& q,
                          const std::vector<RoundingUnitBranch>& branches) {
  bool fits = branches.size() <= kMostBranches;
  for (const RoundingUnitBranch& branch : branches) fits = fits && fits_one_kernel(dq, dout, q, branch.k, branch.v);
  return fits;
}

Select choose_select(const Context& ctx, const ConstTensor& q, const ConstTensor& k_cmp, const SelectOptions& o,
                     const Documents& documents) {
  return ctx.may_use_sm90() && select_sm90_supports(q, k_cmp, o, documents) ? Select::sm90 : Select::portable;
}

Index choose_select_index(const Context& ctx, const ConstTensor& iq, const ConstTensor& ik, const SelectOptions& o) {
  return ctx.may_use_sm90() && select_index_sm90_supports(iq, ik, o) ? Index::sm90 : Index::portable;
}

Index choose_index_forward(const Context& ctx, const IndexForward& index, const ConstTensor& block_index,
                           int64_t l_sel) {
  return ctx.may_use_sm90() && index_forward_sm90_supports(index, block_index, l_sel) ? Index::sm90 : Index::portable;
}

Index choose_index_backward(const Context& ctx, const IndexBackward& index, const AttendIn& in,
                            const ConstTensor& block_index, int64_t l_sel) {
  return ctx.may_use_sm90() && index_backward_sm90_supports(index, in, block_index, l_sel) ? Index::sm90
                                                                                           : Index::portable;
}

const char* fused_name(RangeForward kernel) {
  switch (kernel) {
    case RangeForward::portable:
      return nullptr;
    case RangeForward::sm90:
      return "sm90";
  }
  return nullptr;
}

const char* fused_name(const SelectedForwardChoice& choice) {
  switch (choice.kernel) {
    case SelectedForward::portable:
      return nullptr;
    case SelectedForward::query_stationary:
      return "query_stationary";
    case SelectedForward::kv_stationary:  // the lists decide, on the GPU
      return choice.where_alike == SelectedForward::shared_tile ? "kv_stationary or shared_tile"
                                                                : "kv_stationary or query_stationary";
    case SelectedForward::shared_tile:
      return "shared_tile";
    case SelectedForward::resident_rows:
      return "resident_rows";
  }
  return nullptr;
}

const char* fused_name(Backward kernels) {
  switch (kernels) {
    case Backward::portable:
    case Backward::portable_dq_dk_dv:
      return nullptr;
    case Backward::sm90:
      return "sm90";
    case Backward::sm90_d64:
      return "sm90_d64";
    case Backward::sm90_d128:
      return "sm90_d128";
  }
  return nullptr;
}

const char* fused_name(Select kernel) {
  switch (kernel) {
    case Select::portable:
      return nullptr;
    case Select::sm90:
      return "sm90";
  }
  return nullptr;
}

const char* fused_name(Index kernel) {
  switch (kernel) {
    case Index::portable:
      return nullptr;
    case Index::sm90:
      return "sm90";
  }
  return nullptr;
}

}  // namespace triad::cuda
