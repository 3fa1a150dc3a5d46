// Views of q, k and v in the rows of a layer's fused projection, and which pairs of k and v each kind of attention has.
#pragma once
#include <array>

#include "kernels/nsa/nsa.h"
#include "kernels/nsa/selected_attention.h"
#include "kernels/nsa/window_attention.h"
#include "kernels/ops/qk_norm.h"
#include "model/config.h"

namespace triad {

// Pairs of keys and values in the fused projection: NSA has one for each branch; dense attention, NSA with
// nsa.shared_kv and one softmax over selected blocks or the window have one.
int kv_pairs(const ModelConfig&, AttentionKind);
int64_t kv_width(const ModelConfig&);  // columns of one pair: Hkv*(dk+dv)
int64_t qkv_width(const ModelConfig&, AttentionKind);

// Views of q and the pairs of k and v in the rows of the fused projection (activations or gradients).
struct QkvViews {
  Tensor q;                    // [B,T,Hq,dk]
  std::array<Tensor, 3> k, v;  // [B,T,Hkv,dk], [B,T,Hkv,dv]; NSA: indexed by Branch; a single pair: only the first
  Tensor pairs;                // [B*T, pairs * kv_width]: the columns of k and v
  Tensor index_q, index_k;     // [B,T,Hkv,d_index], [B,T,1,d_index]; absent without a taught index
};
QkvViews split_qkv(const Tensor& qkv, const ModelConfig&, AttentionKind, int64_t B, int64_t T);
// With model.qk_norm, q and all k of a layer after the norm, as columns of one matrix: its width, and the views of
// split_qkv() with q and k replaced by columns of qk [N, qk_width].
int64_t qk_width(const ModelConfig&, AttentionKind);
QkvViews with_qk(QkvViews, const Tensor& qk);
// With a taught index: the width of its projections, and the views with columns of index [N, index_width].
int64_t index_width(const ModelConfig&, int64_t layer);
QkvViews with_index(QkvViews, const Tensor& index, const ModelConfig&);
IndexIn index_in(const QkvViews&);
QkHeads qk_heads(const QkvViews&);  // q and k, for qk_norm
ConstQkHeads const_qk_heads(const QkvViews&);
NsaIn nsa_in(const QkvViews&, const Documents& documents = {});
AttendIn dense_in(const QkvViews&, const Documents& documents = {});

// The views that a layer attends with in a dense pass: q and the last pair, that of the window branch, as the first.
QkvViews dense_views(const QkvViews&, int pairs);

// The pairs of all three branches in the rows pairs [B*T, 3 * kv_width], for layers that share one pair.
QkvViews split_branch_pairs(const Tensor& pairs, const ModelConfig&, int64_t B, int64_t T);

}  // namespace triad
