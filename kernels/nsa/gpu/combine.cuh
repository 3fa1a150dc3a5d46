// The branches' gated sum, out = gate[0] o_cmp + gate[1] o_sel + gate[2] o_win, as device functions for one vector and
// for one bf16 row. nsa/gpu/combine.cu calls them in a separate kernel. Hopper's kernels for the selected branch call
// them in their epilogue, where o_sel's rows are on the chip.
#pragma once
#include "kernels/common/ptx.cuh"
#include "kernels/nsa/gpu/gate.cuh"

namespace triad::cuda {

// The gated sum of V elements. All kernels call this function, so they compute the same bits.
template <int V>
__device__ __forceinline__ void gated_sum(float (&sum)[V], const float (&gate)[3], const float (&o)[3][V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) sum[j] = fmaf(gate[2], o[2][j], fmaf(gate[1], o[1][j], gate[0] * o[0][j]));
}

// The argument with which a selected branch kernel computes the gated sum in its epilogue (CombineAlong in nsa/gate.h).
// active() is false if the caller did not request the sum.
struct CombineRows {
  using bf16 = __nv_bfloat16;
  Bthd<bf16> out;
  Bthd<const bf16> o_cmp, o_win;
  Planes<const float> gate;

  __device__ __forceinline__ bool active() const { return out.data != nullptr; }

  // Prefetches into L2 the 128-byte lines of o_cmp and o_win that contain row (b, t, h), column `column`.
  __device__ __forceinline__ void prefetch(int b, int t, int h, int column) const {
    prefetch_l2(o_cmp.row(b, t, h) + column);
    prefetch_l2(o_win.row(b, t, h) + column);
  }

  // All operands' row (b, t, h); head h belongs to group g. store() writes eight columns of the row's gated sum.
  struct Row {
    bf16* out;
    const bf16 *o_cmp, *o_win;
    float gate[3];
    __device__ __forceinline__ Row(const CombineRows& all, int b, int t, int h, int g)
        : out(all.out.row(b, t, h)), o_cmp(all.o_cmp.row(b, t, h)), o_win(all.o_win.row(b, t, h)) {
#pragma unroll
      for (int i = 0; i < 3; ++i) gate[i] = __ldg(&all.gate.at(i, b, t, g));
    }
    // o_cmp's and o_win's columns `column` to column + 7, loaded with the hint that they are not read again.
    struct Others {
      uint4 cmp, win;
    };
    __device__ __forceinline__ Others others(int column) const {
      return {__ldcs(reinterpret_cast<const uint4*>(o_cmp + column)),
              __ldcs(reinterpret_cast<const uint4*>(o_win + column))};
    }
    __device__ __forceinline__ void store(int column, const uint4& o_sel, const Others& others) const {
      float o[3][8], sum[8];
      as_floats<bf16>(o[0], others.cmp);
      as_floats<bf16>(o[1], o_sel);
      as_floats<bf16>(o[2], others.win);
      gated_sum(sum, gate, o);
      store_vector<8>(out + column, sum);
    }
    __device__ __forceinline__ void store(int column, const uint4& o_sel) const {
      store(column, o_sel, others(column));
    }
  };
};
// first_token: the token in the tensors' first row (RowPart). `along` has no rows before it.
inline CombineRows combine_rows(const CombineAlong* along, int64_t first_token) {
  if (along == nullptr) return {};
  CombineRows rows{bthd<__nv_bfloat16>(along->out), bthd<__nv_bfloat16>(along->o_cmp),
                   bthd<__nv_bfloat16>(along->o_win), planes<const float>(along->gate)};
  const auto begin_earlier = [&](auto& view) { view.data -= first_token * view.stride_t; };
  begin_earlier(rows.out), begin_earlier(rows.o_cmp), begin_earlier(rows.o_win), begin_earlier(rows.gate);
  return rows;
}
// Whether CombineRows supports these tensors: bf16, with rows that consist of aligned 16-byte vectors.
inline bool combine_rows_fit(const CombineAlong& along) {
  return along.out.dtype == DType::bf16 &&
         all_have_vectors(kVector<__nv_bfloat16>, along.out, along.o_cmp, along.o_win);
}

}  // namespace triad::cuda
