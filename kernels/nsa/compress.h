// NSA's compression phi (paper Eq. 7): row y_c of the compressed keys or values summarizes tokens [c*d, c*d + l).
//   avg:  y_c = mean over the block's rows
//   conv: y_c[j] = sum_i w[i,j] x[c*d + i, j]
//   mlp:  y_c = fc2(SiLU(fc1(concat_i(x[c*d + i] + pos[i])))), no bias, 2D hidden units
// All groups share the weights; keys and values have separate weights. Keys are compressed after RoPE.
#pragma once
#include "engine/context.h"
#include "kernels/common/documents.h"

namespace triad {

enum class Phi { avg, conv, mlp };

// Tc, the number of compressed blocks in T tokens; 0 while T < l.
constexpr int64_t compressed_length(int64_t T, int64_t l, int64_t d) { return blocks_within(T, l, d); }

// Compressed block c is the tokens [c*d, c*d + l).
struct CompressionBlocks {
  int64_t l = 32, d = 16;  // length and stride, in tokens
};
struct PhiOptions : CompressionBlocks {
  Phi kind = Phi::avg;
};
template <class TensorType>
struct PhiTensors {
  TensorType w;              // conv: [l,D]
  TensorType pos, fc1, fc2;  // mlp: [l,D], [2D, l*D], [D,2D]
};
using PhiWeights = PhiTensors<ConstTensor>;  // T
using PhiGrads = PhiTensors<Tensor>;         // acc, added to

// y [B,Tc,H,D] T overwritten  <-  x [B,T,H,D] T
// documents: blocks are counted in each document, and numbered in the row as common/documents.h says; y rows that no
// document uses are 0. Backward ignores dy there.
// documents.part: x holds a row's tokens from number part.first_key on, a multiple of d, and the tables cover these
// tokens. y has rows for the blocks that fit into x, from number first_key / d on, and backward's dx holds the
// gradients through these blocks.
// With tables, a document may shift a block by up to d - 1 tokens, so x needs rows for these too, up to the row's end.
void nsa_compress_forward(Context&, Tensor y, ConstTensor x, const PhiWeights&, const PhiOptions&,
                          const Documents& documents = {});
// dx [B,T,H,D] T overwritten (0 for tokens outside every block), weight gradients added to  <-  dy [B,Tc,H,D] acc, x as
// in forward
void nsa_compress_backward(Context&, Tensor dx, const PhiGrads&, ConstTensor dy, ConstTensor x, const PhiWeights&,
                           const PhiOptions&, const Documents& documents = {});

// The same for avg and conv alone. They need no matrix products, hence no BLAS: libtriad_nsa.so links these only.
void nsa_compress_linear_forward(Context&, Tensor y, ConstTensor x, const PhiWeights&, const PhiOptions&,
                                 const Documents& documents = {});
void nsa_compress_linear_backward(Context&, Tensor dx, const PhiGrads&, ConstTensor dy, ConstTensor x,
                                  const PhiWeights&, const PhiOptions&, const Documents& documents = {});

namespace cuda {
// The avg and conv kernels. mlp uses ops/matmul.h and ops/activation.h between the gather and the scatter below.
void compress_linear_forward(Context&, Tensor y, ConstTensor x, const PhiWeights&, const PhiOptions&, const Documents&);
void compress_linear_backward(Context&, Tensor dx, const PhiGrads&, ConstTensor dy, ConstTensor x, const PhiWeights&,
                              const PhiOptions&, const Documents&);
// rows [B*Tc*H, l*D] T overwritten (0 for blocks that no document uses)  <-  x [B,T,H,D] T + pos [l,D] T
void compress_gather(Context&, Tensor rows, ConstTensor x, ConstTensor pos, const PhiOptions&, const Documents&);
// dx [B,T,H,D] T overwritten, dpos [l,D] acc added to  <-  drows [B*Tc*H, l*D] T
void compress_scatter(Context&, Tensor dx, Tensor dpos, ConstTensor drows, const PhiOptions&, const Documents&);
}  // namespace cuda
}  // namespace triad
