// Gate and list statistics: checks, dispatch, CPU loops over the same row pieces as on the GPU.
#include "kernels/nsa/stats.h"

#include <cmath>
#include <cstring>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

NsaStats load(const double* from) {
  NsaStats s;
  std::memcpy(s.at, from, sizeof s.at);
  return s;
}
void store(double* to, const NsaStats& s) { std::memcpy(to, s.at, sizeof s.at); }

// Adds one row's gates to s. Branch b's gate is gate[b * plane].
template <class A>
void add_gates(NsaStats& s, const A* gate, int64_t plane) {
  A p[3] = {gate[0], gate[plane], gate[2 * plane]}, entropy = 0;
  const A sum = p[0] + p[1] + p[2];
  if (sum == 0) return s.add_dead_gates();
  for (A& x : p) {
    x /= sum;
    if (x != 0) entropy -= x * std::log(x);
  }
  s.add_gates(p[0], p[1], p[2], entropy);
}

template <class A>
void stats_cpu(Context& ctx, Tensor pieces, ConstTensor gate, ConstTensor block_index, const SelectOptions& o,
               const Documents& documents) {
  const int64_t T = block_index.size(1), groups = block_index.size(2), n = block_index.size(3);
  const int64_t rows = block_index.size(0) * T * groups, tokens = documents.part.tokens_or(T);
  const int32_t* const lists = block_index.ptr<int32_t>();
  parallel_for(ctx, kStatsPieces, [&](int64_t piece) {
    double* const slot = pieces.ptr<double>() + piece * NsaStats::count;
    NsaStats s = load(slot);
    NsaStats mine;
    for (int64_t r = rows * piece / kStatsPieces; r < rows * (piece + 1) / kStatsPieces; ++r) {
      const int64_t i = r / groups % T, t = documents.part.token(i);
      const DocumentRow<int64_t> row = host_row(documents, r / groups / T, tokens);
      if (gate.empty())
        mine.add_dead_gates();
      else
        add_gates(mine, gate.ptr<A>() + r, rows);
      const int64_t at = t - row.begin(t);
      mine.add_list(lists + r * n, at == 0 || documents.part.begins(i) ? nullptr : lists + (r - groups) * n, at, n, o,
                    row.first_block(t));
    }
    s.merge(mine);
    store(slot, s);
  });
}

}  // namespace

void nsa_stats(Context& ctx, Tensor pieces, ConstTensor gate, ConstTensor block_index, const SelectOptions& o,
               const Documents& documents) {
  const OpScope op_scope(ctx, "nsa_stats");
  TRIAD_CHECK(block_index.rank == 4 && block_index.contiguous() && (gate.empty() || gate.contiguous()),
              "nsa_stats: gates {} and lists {} have to be contiguous", gate.str(), block_index.str());
  const int64_t B = block_index.size(0), T = block_index.size(1), groups = block_index.size(2);
  check_tensor("nsa_stats: pieces", pieces, {kStatsPieces, NsaStats::count}, DType::f64);
  check_tensor("nsa_stats: lists", block_index, {B, T, groups, o.n_sel}, DType::i32);
  if (!gate.empty()) check_tensor("nsa_stats: gate", gate, {3, B, T, groups}, gate.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_stats(ctx, pieces, gate, block_index, o, documents);
  }
  if (gate.dtype == DType::f64) return stats_cpu<double>(ctx, pieces, gate, block_index, o, documents);
  stats_cpu<float>(ctx, pieces, gate, block_index, o, documents);
}

void nsa_stats_merge(Context& ctx, Tensor out, ConstTensor pieces) {
  const OpScope op_scope(ctx, "nsa_stats_merge");
  const int64_t layers = out.size(0);
  check_tensor("nsa_stats_merge: out", out, {layers, NsaStats::count}, DType::f64);
  check_tensor("nsa_stats_merge: pieces", pieces, {layers, kStatsPieces, NsaStats::count}, DType::f64);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_stats_merge(ctx, out, pieces);
  }
  parallel_for(ctx, layers, [&](int64_t layer) {
    NsaStats all;
    for (int64_t i = 0; i < kStatsPieces; ++i)
      all.merge(load(pieces.ptr<double>() + (layer * kStatsPieces + i) * NsaStats::count));
    store(out.ptr<double>() + layer * out.stride[0], all);
  });
}

}  // namespace triad
