// Muon: the batch plan, on any device, and momentum and update on the CPU, with state in f32 or bf16, or all in f64;
// masters also split.
#include "kernels/update/muon.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/parallel.h"
#include "kernels/update/adamw.h"
#include "kernels/update/newton_schulz.h"
#include "kernels/update/stored_state.h"

namespace triad {

namespace {

std::span<const MuonPiece> rows_of(const ConstTensor& pieces) {
  static_assert(sizeof(MuonPiece) == MuonPiece::kFields * sizeof(int64_t));
  return {reinterpret_cast<const MuonPiece*>(pieces.ptr<int64_t>()), static_cast<size_t>(pieces.size(0))};
}

template <class U, class M, class G>
void momentum_cpu(Context& ctx, Tensor u, const MuonTensors& t, const MuonOptions& o) {
  using A = acc_t<U>;
  const A momentum = static_cast<A>(o.momentum), fresh = static_cast<A>(1 - o.momentum);
  parallel_for(ctx, t.pieces.size(0), [&](int64_t p) {
    const double norm = std::sqrt(*t.grad_norm_squared.ptr<double>());
    if (!std::isfinite(norm)) return;
    const A clip = o.grad_clip > 0 ? static_cast<A>(std::min(1.0, o.grad_clip / (norm + 1e-6))) : A{1};
    const MuonPiece& piece = rows_of(t.pieces)[static_cast<size_t>(p)];
    StoredState<M> m(t.m, o, AdamWTensor::m);
    for (int64_t j = 0; j < piece.count; ++j) {
      const int64_t i = piece.element - o.first_element + j;
      const A g = static_cast<A>(t.grad.ptr<G>()[i]) * clip;
      const A new_m = momentum * static_cast<A>(m.get(i)) + fresh * g;
      m.set(i, new_m);
      u.ptr<U>()[piece.at + j] = static_cast<U>(momentum * new_m + fresh * g);
    }
  });
}

template <class P, class U>
void apply_cpu(Context& ctx, const MuonTensors& t, ConstTensor update, const MuonOptions& o) {
  using A = acc_t<P>;
  const A decay = static_cast<A>(1 - o.lr * o.weight_decay);
  parallel_for(ctx, t.pieces.size(0), [&](int64_t p) {
    if (!std::isfinite(*t.grad_norm_squared.ptr<double>())) return;
    const MuonPiece& piece = rows_of(t.pieces)[static_cast<size_t>(p)];
    const A step_size = static_cast<A>(o.lr * kMuonScale * std::sqrt(static_cast<double>(piece.longest)));
    StoredMaster<P> param(t.param, t.weights, t.ties, o);
    for (int64_t j = 0; j < piece.count; ++j) {
      const int64_t i = piece.element - o.first_element + j;
      // An explicit fma, since a compiler would fuse one of the two products, not the same for each master type.
      const A step = step_size * static_cast<A>(update.ptr<U>()[piece.at + j]);
      const A new_p = std::fma(static_cast<A>(param.get(i)), decay, -step);
      param.set(i, new_p);
    }
  });
}

void check(const MuonTensors& t, const MuonOptions& o) {
  const bool split = is_remainder(t.param);
  TRIAD_CHECK(t.m.rank == 1 && (split || t.param.shape() == t.m.shape()) && t.grad.shape() == t.m.shape(),
              "muon: param {}, m {} and grad {} are not vectors of one size", t.param.str(), t.m.str(), t.grad.str());
  if (split) check_split_master("muon: split master", {t.param, t.weights, t.ties}, t.m.size(0));
  if (!t.weights.empty()) {
    check_tensor("muon: weights", t.weights, t.m.shape(), DType::bf16);
    TRIAD_CHECK(t.param.dtype != DType::bf16, "muon: both param and weights are bf16");
  }
  check_tensor("muon: grad_norm_squared", t.grad_norm_squared, {1}, DType::f64);
  TRIAD_CHECK(t.pieces.rank == 2, "muon: pieces are {}", t.pieces.str());
  check_tensor("muon: pieces", t.pieces, {t.pieces.size(0), MuonPiece::kFields}, DType::i64);
  TRIAD_CHECK(o.step >= 1, "muon: step {}; the first is 1", o.step);
  TRIAD_CHECK(o.first_element >= 0, "muon: first element {}", o.first_element);
}

}  // namespace

MuonPlan::MuonPlan(const std::vector<MuonMatrix>& matrices, int64_t ranks, int64_t most_elements) : ranks_(ranks) {
  std::vector<MuonMatrix> batch;
  int64_t elements = 0;
  for (const MuonMatrix& matrix : matrices) {
    if (!batch.empty() && elements + matrix.size() > most_elements) {
      add_batch(batch);
      batch.clear(), elements = 0;
    }
    batch.push_back(matrix), elements += matrix.size();
  }
  if (!batch.empty()) add_batch(batch);
}

void MuonPlan::add_batch(const std::vector<MuonMatrix>& matrices) {
  constexpr int64_t kAlign = 128;  // element alignment between groups, so that each begins at an aligned address
  Batch batch;
  const auto group_of = [&](const MuonMatrix& m) {
    return std::find_if(batch.groups.begin(), batch.groups.end(),
                        [&](const Group& g) { return g.rows == m.rows && g.cols == m.cols; });
  };
  for (const MuonMatrix& matrix : matrices) {
    auto group = group_of(matrix);
    if (group == batch.groups.end()) {
      batch.groups.emplace_back();
      group = batch.groups.end() - 1;
      group->rows = matrix.rows, group->cols = matrix.cols;
    }
    ++group->n;
  }
  for (Group& g : batch.groups) {
    if (ranks_ == 1 || g.n < ranks_) continue;
    g.per_rank = ceil_div(g.n, ranks_), g.at = batch.part;
    batch.part = align_up(batch.part + g.per_rank * g.size(), kAlign);
  }
  batch.elements = ranks_ * batch.part;
  for (Group& g : batch.groups) {
    if (g.per_rank > 0) continue;
    g.at = align_up(batch.elements, kAlign);
    batch.elements = g.at + g.n * g.size();
  }
  batch.first_piece = static_cast<int64_t>(pieces_.size());
  std::vector<int64_t> next(batch.groups.size(), 0);  // each group's next matrix
  for (const MuonMatrix& matrix : matrices) {
    const auto group = group_of(matrix);
    const int64_t i = next[static_cast<size_t>(group - batch.groups.begin())]++;
    const int64_t rank_matrices = group->per_rank == 0 ? group->n : group->per_rank;
    const int64_t at = batch.at(*group, i / rank_matrices) + i % rank_matrices * group->size();
    for (int64_t begin = 0; begin < matrix.size(); begin += MuonPiece::kMost)
      pieces_.push_back({.element = matrix.element + begin,
                         .at = at + begin,
                         .count = std::min(MuonPiece::kMost, matrix.size() - begin),
                         .longest = std::max(matrix.rows, matrix.cols)});
  }
  batch.end_piece = static_cast<int64_t>(pieces_.size());
  batches_.push_back(std::move(batch));
}

void muon(Context& ctx, const MuonPlan& plan, const MuonTensors& tensors, const MuonOptions& o, int64_t rank,
          const GatherParts& gather) {
  for (const MuonPlan::Batch& batch : plan.batches()) {
    Scratch::Scope scope(ctx.scratch);
    const Tensor updates = scope.alloc(muon_dtype(ctx, tensors.m.dtype), {batch.elements});
    MuonTensors t = tensors;
    t.pieces = tensors.pieces.slice(0, batch.first_piece, batch.end_piece);
    muon_momentum(ctx, updates, t, o);
    orthogonalize(ctx, batch, updates, rank);
    if (batch.part > 0) gather(updates.slice(0, 0, plan.ranks() * batch.part));
    muon_apply(ctx, t, updates, o);
  }
}

void orthogonalize(Context& ctx, const MuonPlan::Batch& batch, Tensor updates, int64_t rank) {
  for (const MuonPlan::Group& g : batch.groups) {
    const int64_t n = g.count(rank), at = batch.at(g, rank);
    if (n > 0) newton_schulz(ctx, updates.slice(0, at, at + n * g.size()).view({n, g.rows, g.cols}));
  }
}

void muon_momentum(Context& ctx, Tensor u, const MuonTensors& t, const MuonOptions& o) {
  const OpScope op_scope(ctx, "muon_momentum");
  check(t, o);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::muon_momentum(ctx, u, t, o);
  }
  if (t.m.dtype == DType::f64) return momentum_cpu<double, double, double>(ctx, u, t, o);
  dispatch_state("muon: u", u.dtype, [&]<class U>() {
    dispatch_state("muon: m", t.m.dtype, [&]<class M>() {
      dispatch_state("muon: grad", t.grad.dtype, [&]<class G>() { momentum_cpu<U, M, G>(ctx, u, t, o); });
    });
  });
}

void muon_apply(Context& ctx, const MuonTensors& t, ConstTensor update, const MuonOptions& o) {
  const OpScope op_scope(ctx, "muon_apply");
  check(t, o);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::muon_apply(ctx, t, update, o);
  }
  if (t.param.dtype == DType::f64) return apply_cpu<double, double>(ctx, t, update, o);
  const auto with_master = [&]<class P>() {
    dispatch_state("muon: o", update.dtype, [&]<class U>() { apply_cpu<P, U>(ctx, t, update, o); });
  };
  if (is_remainder(t.param)) return with_master.template operator()<uint16_t>();
  dispatch_state("muon: param", t.param.dtype, with_master);
}

}  // namespace triad
