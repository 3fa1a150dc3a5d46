#include "train/dist/muon_shards.h"

#include <algorithm>

#include "kernels/update/newton_schulz.h"

namespace triad {

MuonShards::MuonShards(Context& ctx, Arena& arena, const MuonPlan& plan, GradReducer& reducer)
    : plan_(plan), reducer_(reducer) {
  const std::vector<GradBucket>& buckets = reducer.plan().buckets();
  std::vector<MuonPiece> in_bucket, in_batch;
  for (const MuonPlan::Batch& batch : plan.batches()) {
    std::vector<Share>& shares = shares_.emplace_back();
    for (size_t b = 0; b < buckets.size(); ++b) {
      Share share;
      share.bucket = b, share.first_row = static_cast<int64_t>(in_batch.size());
      const ElementRange own = shard(b);
      for (int64_t row = batch.first_piece; row < batch.end_piece; ++row) {
        const MuonPiece& piece = plan.pieces()[static_cast<size_t>(row)];
        const auto clipped = [&](const ElementRange& range) {
          return ElementRange{std::max(piece.element, range.begin), std::min(piece.element + piece.count, range.end)};
        };
        const auto at = [&](const ElementRange& range) { return piece.at + range.begin - piece.element; };
        if (const ElementRange all = clipped(buckets[b].elements); all.size() > 0) {
          Run* const last = share.runs.empty() ? nullptr : &share.runs.back();
          if (last != nullptr && last->elements.end == all.begin && last->at + last->elements.size() == at(all))
            last->elements.end = all.end;
          else
            share.runs.push_back({all, at(all)});
        }
        if (const ElementRange kept = clipped(own); kept.size() > 0) {
          in_batch.push_back({.element = kept.begin, .at = at(kept), .count = kept.size(), .longest = piece.longest});
          in_bucket.push_back(in_batch.back());
          in_bucket.back().at = kept.begin - buckets[b].elements.begin;
        }
      }
      share.end_row = static_cast<int64_t>(in_batch.size());
      if (!share.runs.empty()) shares.push_back(std::move(share));
    }
  }
  // Room for as many pieces as any rank can have, so all ranks allocate the same.
  const auto most = static_cast<int64_t>(plan.pieces().size() + buckets.size());
  const auto table = [&](const char* name, const std::vector<MuonPiece>& rows) {
    const Tensor room = arena.alloc(MemTag::optimizer, name, DType::i64, {most, MuonPiece::kFields});
    const Tensor used = room.slice(0, 0, static_cast<int64_t>(rows.size()));
    write(ctx, used, rows.data());
    return used;
  };
  in_bucket_ = table("muon pieces in buckets", in_bucket);
  in_batch_ = table("muon pieces in batches", in_batch);
}

void MuonShards::step(Context& ctx, const TensorsOf& tensors_of, MuonOptions o) {
  const Tensor staging = reducer_.staging();
  for (size_t b = 0; b < shares_.size(); ++b) {
    const MuonPlan::Batch& batch = plan_.batches()[b];
    Scratch::Scope scope(ctx.scratch);
    const Tensor updates = scope.alloc(muon_dtype(ctx), {batch.elements});
    const auto tensors = [&](const Share& share, const Tensor& table) {
      MuonTensors t = tensors_of(share.bucket);
      t.pieces = table.slice(0, share.first_row, share.end_row);
      o.first_element = shard(share.bucket).begin;
      return t;
    };
    for (const Share& share : shares_[b]) {
      const GradBucket& bucket = reducer_.plan().buckets()[share.bucket];
      const Tensor gathered(staging.data, updates.dtype, {bucket.elements.size()}, staging.device);
      const MuonTensors t = tensors(share, in_bucket_);
      muon_momentum(ctx, gathered, t, o);
      reducer_.gather(bucket, gathered, "updates");
      reducer_.queue().join();
      for (const Run& run : share.runs)
        copy(ctx, updates.slice(0, run.at, run.at + run.elements.size()),
             gathered.slice(0, run.elements.begin - bucket.elements.begin, run.elements.end - bucket.elements.begin));
    }
    orthogonalize(ctx, batch, updates, reducer_.queue().rank());
    if (batch.part > 0) {
      reducer_.queue().all_gather(updates.slice(0, 0, plan_.ranks() * batch.part), "updates of matrices");
      reducer_.queue().join();
    }
    for (const Share& share : shares_[b]) {
      const MuonTensors t = tensors(share, in_batch_);
      muon_apply(ctx, t, updates, o);
    }
  }
}

}  // namespace triad
