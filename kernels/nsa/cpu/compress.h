// What phi's kinds share on the CPU (compress.cpp: mlp; compress_linear.cpp: avg and conv): which tokens a block
// covers, shape checks, row addresses.
#pragma once
#include <algorithm>

#include "engine/check.h"
#include "kernels/nsa/compress.h"

namespace triad::compress_cpu {

// The sizes of x [B,T,H,D] and its Tc blocks, and which tokens a block covers. If x holds a part of a row, tokens and
// blocks are counted from the part's first ones, and a document that began before it begins at a negative token.
struct Blocks {
  int64_t B, T, H, D, l, d, Tc;
  const Documents& documents;
  Blocks(const ConstTensor& x, const PhiOptions& o, const Documents& docs)
      : B(x.size(0)),
        T(x.size(1)),
        H(x.size(2)),
        D(x.size(3)),
        l(o.l),
        d(o.d),
        Tc(compressed_length(T, l, d)),
        documents(docs) {}
  // Block c's first token in sequence b; -1 if no document uses the block.
  int64_t begin(int64_t b, int64_t c) const { return host_row(documents, b, T).key_begin(c, l, d); }
  // Calls visit(c, i) for each block c that covers sequence b's token s, as its token i, in ascending order.
  template <class Visit>
  void for_each_cover(int64_t b, int64_t s, Visit&& visit) const {
    const DocumentRow<int64_t> row = host_row(documents, b, T);
    const int64_t at = s - row.begin(s), first_key = floor_div(row.begin(s), d);
    const int64_t last = std::min(compressed_length(row.end(s) - row.begin(s), l, d), at / d + 1);
    for (int64_t c = std::max(blocks_within(at, l, d), -first_key); c < last; ++c) visit(first_key + c, at - c * d);
  }
};

template <class TensorType>
void check_phi(const char* what, const PhiTensors<TensorType>& w, const PhiOptions& o, int64_t D, DType dtype) {
  if (o.kind == Phi::conv) check_tensor(what, w.w, {o.l, D}, dtype);
  if (o.kind == Phi::mlp) {
    check_tensor(what, w.pos, {o.l, D}, dtype);
    check_tensor(what, w.fc1, {2 * D, o.l * D}, dtype);
    check_tensor(what, w.fc2, {D, 2 * D}, dtype);
  }
}

inline void check_compress(const ConstTensor& x, const ConstTensor& y, DType y_dtype, const PhiWeights& w,
                           const PhiOptions& o, const Documents& documents) {
  TRIAD_CHECK(x.rank == 4 && is_float(x.dtype), "nsa_compress: x is {}, not floats of four axes", x.str());
  TRIAD_CHECK(o.l >= 1 && o.d >= 1, "nsa_compress: blocks of {} tokens every {}", o.l, o.d);
  TRIAD_CHECK(documents.empty() || o.d <= o.l, "nsa_compress: blocks of {} tokens every {} leave gaps", o.l, o.d);
  const RowPart& part = documents.part;
  TRIAD_CHECK(part.whole() || documents.empty() || documents.begin.size(1) == x.size(1),
              "nsa_compress: tables {} of documents for {}", documents.begin.str(), x.str());
  TRIAD_CHECK(part.whole() || part.first_key % o.d == 0, "nsa_compress: {} begins at token {}, within a stride of {}",
              x.str(), part.first_key, o.d);
  const Blocks n(x, o, documents);
  check_tensor("nsa_compress: y", y, {n.B, n.Tc, n.H, n.D}, y_dtype);
  check_phi("nsa_compress: a weight of phi", w, o, n.D, x.dtype);
}

template <class T>
const T* row_of(const ConstTensor& x, int64_t b, int64_t t, int64_t h) {
  return x.ptr<T>() + b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
}
template <class T>
T* row_of(const Tensor& x, int64_t b, int64_t t, int64_t h) {
  return x.ptr<T>() + b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
}

}  // namespace triad::compress_cpu
