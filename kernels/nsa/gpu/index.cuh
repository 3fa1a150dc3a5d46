// What the GPU kernels of a taught index share (formulas: nsa/index.h): the views of a call, and the sums of its
// backward that many CTAs add to.
//
// A key's dik is a sum over all tokens and groups that see it, which CTAs add as integers, so that every order gives
// the same bits: FixedPoint counts in a power of two so small that 62 bits hold every sum that the call can give. In
// f32 a row's diq is such a sum too. In bf16 it is a sum of floats, each rounded to a multiple of the row's unit, as dq
// of the branches is (nsa/README.md): it is at most 2 |scale| max|ik| / sqrt(di), so no bound on other gradients is
// needed. Both bounds need the largest element of iq or ik (IndexBounds), of each document by itself, so that no
// document's result depends on another.
#pragma once
#include <bit>

#include "kernels/nsa/gpu/attend.cuh"
#include "kernels/nsa/index.h"

namespace triad::cuda {

// The views of a call that forward and backward have. Query rows are numbered by token, as in make_query_view().
template <class T>
struct IndexView {
  View<const T> q, k;  // the index's
  float scale;         // 1 / sqrt(di)
};
template <class T>
IndexView<T> make_index_view(const IndexIn& index, const AttendIn& in) {
  return {make_query_view<const T>(in, index.q), make_view<const T>(index.k),
          static_cast<float>(1.0 / std::sqrt(static_cast<double>(index.q.size(3))))};
}

// The rows that count: those before their sequence's first padded token.
struct CountedRows {
  const int* padding_begin;  // [B], or nullptr
  int first_key;             // number in the whole row of the call's token 0
  __device__ __forceinline__ bool operator()(int b, int t) const {
    return padding_begin == nullptr || first_key + t < padding_begin[b];
  }
};
inline CountedRows counted_rows(const IndexBackward& index, const AttendIn& in) {
  return {index.padding_begin.empty() ? nullptr : index.padding_begin.ptr<int32_t>(),
          static_cast<int>(in.documents.part.first_key)};
}

// The largest |element| of iq and of ik in each document, at the document's first token: [B,tokens] each, as the bits
// of floats, which are ordered as their values are.
struct IndexBounds {
  unsigned *q, *k;
  int tokens;
  __device__ __forceinline__ float query(int b, int document) const {
    return __uint_as_float(q[int64_t{b} * tokens + document]);
  }
  __device__ __forceinline__ float key(int b, int document) const {
    return __uint_as_float(k[int64_t{b} * tokens + document]);
  }
};
IndexBounds compute_index_bounds(Context&, Scratch::Scope&, const IndexIn&, const AttendIn&);

// The exponent e of the least power of two above x >= 0: x < 2^e.
__device__ __forceinline__ int exponent_above(float x) { return x > 0.0f && x < INFINITY ? ilogbf(x) + 1 : 0; }

// How sums of (Q - P) * iq and of (Q - P) * ik are counted: in units of 2^-shift. A sum over n rows, or over all keys
// of one row (n = 1), is less than 2 n max|element|, and Q and P, as computed, sum to less than 2 in place of 1.
struct FixedPoint {
  int shift;
  __device__ __forceinline__ FixedPoint(float most, int64_t rows)
      : shift(60 - exponent_above(most) - std::bit_width(static_cast<uint64_t>(rows))) {}
  __device__ __forceinline__ void add(int64_t* to, float x) const {
    const long long units = __double2ll_rn(scalbn(static_cast<double>(x), shift));
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(units));
  }
  __device__ __forceinline__ double value(int64_t sum) const { return scalbn(static_cast<double>(sum), -shift); }
};

// The rounding unit of a row of diq, for round_to_unit(). most: the largest element of ik in the row's document;
// factor: |scale| / sqrt(di). The terms of a row add up to less than twice the unit.
__device__ __forceinline__ float diq_unit(float most, float factor) {
  return exp2f(static_cast<float>(max(-100, exponent_above(1.5f * most * factor))));
}

// The sums of backward's kernels, in scratch, zero at first.
struct IndexSums {
  int64_t* dk;     // [B,tokens,di] of FixedPoint(bounds.query, tokens * groups), without `scale` / sqrt(di)
  int64_t* dq;     // [B,tokens,Hkv,di] of FixedPoint(bounds.key, 1), likewise; nullptr: CTAs add to dq itself
  double* losses;  // [ctas]: each CTA's part of the loss, zero where it has none
  int64_t ctas;
  IndexBounds bounds;
};
// ctas: of the kernel that computes them. sums_dq: in f32; otherwise dq itself is set to zero.
IndexSums make_index_sums(Context&, Scratch::Scope&, const IndexBackward&, const AttendIn&, int64_t ctas, bool sums_dq);
// Overwrites dk, and dq if there are sums of it, and adds to the loss.
void finish_index_sums(Context&, const IndexSums&, const IndexBackward&, const AttendIn&);

// The exponential and logarithm of teacher and student: in powers of 2 for bf16, whose kernels scale scores by
// kLogUnits, and the slower exact functions in f32.
template <class T>
inline constexpr float kLogUnits = std::is_same_v<T, float> ? 1.0f : kLog2e;
template <class T>
__device__ __forceinline__ float index_exp(float x) {
  return std::is_same_v<T, float> ? expf(x) : exp2_approx(x);
}
// Teacher P and student of one key: returns Q - P, and adds to kl. log_q: the student's score less its lse.
template <class T>
__device__ __forceinline__ float learn(float teacher, float log_q, float& kl) {
  constexpr float kLeast = 1e-30f;  // log2_approx() takes no denormals; what a smaller P adds is nothing
  const float log_p = std::is_same_v<T, float> ? logf(teacher) : log2_approx(teacher);
  kl += teacher > kLeast ? teacher * (log_p - log_q) : 0.0f;
  return index_exp<T>(log_q) - teacher;
}

// The arguments of backward's kernels.
template <class T>
struct IndexBackwardArgs {
  Attend<T> in;
  IndexView<T> index;
  View<const float> lse, index_lse;  // of the branch and of the student
  CountedRows counts;
  KeyRange range;
  KeyWorkList list;
  IndexSums sums;
  View<float> dq;
  LossScale scale;
  int sequences_and_groups;
};
template <class T>
IndexBackwardArgs<T> make_backward_args(const char* op, const IndexBackward& index, const AttendIn& in,
                                        const ConstTensor& lse, const KeyRange& range, const KeyWorkList& list,
                                        const IndexSums& sums) {
  return {make_attend<T>(op, in),
          make_index_view<T>(index.in, in),
          make_query_view<const float>(in, lse),
          make_query_view<const float>(in, index.lse),
          counted_rows(index, in),
          range,
          list,
          sums,
          make_query_view<float>(in, index.dq),
          index.scale,
          static_cast<int>(in.k.size(0) * in.k.size(2))};
}

// ---- launchers of the portable kernels: any card, f32 and bf16, any even width of the index ----
// block_index is absent in dense attention, whose rows see all tokens up to their own.
void index_forward_portable(Context&, const IndexForward&, const AttendIn&, const ConstTensor& block_index,
                            int64_t l_sel);
void index_backward_portable(Context&, const IndexBackward&, const AttendIn&, const ConstTensor& lse,
                             const ConstTensor& block_index, int64_t l_sel);

// The keys that rows see: the lists' blocks, or, without lists, every token up to the row's own.
SelectedKeys make_taught_keys(const char* op, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
// The pieces of work of dk: the tokens that list a block, cut as `plan` says; without lists, each block of block_keys
// keys has `parts` pieces.
KeyWorkList make_taught_work(Context&, Scratch::Scope&, const char* op, const AttendIn&, const SelectedKeys&,
                             const PiecePlan& plan, int block_keys, int64_t parts);

}  // namespace triad::cuda
