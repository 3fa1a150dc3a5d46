#include "train/dist/grad_reducer.h"

#include <algorithm>

#include "engine/check.h"
#include "kernels/ops/cast.h"
#include "kernels/step/rank_sum.h"
#include "kernels/step/reduce.h"

namespace triad {

namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// The parameter whose gradient shows whether this rank's backward was finite: the gain of the first norm. Its gradient
// is computed from the last dx of backward, which any earlier NaN or infinity reaches.
constexpr const char* kProbe = "blocks.0.norm1.weight";

}  // namespace

GradReducer::GradReducer(Context& ctx, Arena& arena, const Params& params, Comm& comm, const Config& config,
                         Tensor probe)
    : ctx_(ctx),
      params_(params),
      comm_(comm),
      zero_(config.dist.zero == 1),
      ctas_(comm_ctas_during_backward(config, comm.world())),
      plan_(params, config.dist, comm.rank(), comm.world()),
      queue_(ctx, comm),
      probe_param_(index_of_param(params, kProbe)),
      probe_(probe),
      finder_(params),
      filled_(plan_.buckets().size()) {
  const int64_t largest = plan_.largest();
  if (config.dist.grad_dtype == Precision::bf16)
    sent_bf16_ = arena.alloc(MemTag::comm, "bucket in bf16", DType::bf16, {largest});
  Tensor flags;
  if (zero_ || (ctx.device.is_cuda() && comm.may_share())) {
    staging_ = arena.alloc(MemTag::comm, "room for a bucket", DType::f32, {largest});
    flags = arena.alloc(MemTag::comm, "ranks' meetings", DType::i32, {comm.world()});
  }
  if (zero_)
    squares_ = arena.alloc(MemTag::comm, "pieces of the norm", DType::f64, {params.stored_elements() / kSumPiece});
  if (ctx.planning || staging_.empty()) return;
  std::vector<Tensor> shared = {params.grads(), params.weights(), staging_};
  if (!sent_bf16_.empty()) shared.push_back(sent_bf16_);
  comm.share(arena.base(), shared, flags);
}

void GradReducer::begin(bool recorded) {
  recorded_ = recorded;
  order_.clear();
  missing_.clear();
  for (const GradBucket& bucket : plan_.buckets()) missing_.push_back(bucket.params.size());
  streams_.clear();
  // A bucket that holds only padding, no gradient, counts as full from the start.
  for (size_t b = 0; b < plan_.buckets().size(); ++b)
    if (missing_[b] == 0) full(static_cast<int64_t>(b));
}

void GradReducer::ready(ConstTensor grad, const Stream& on) {
  if (std::find(streams_.begin(), streams_.end(), &on) == streams_.end()) streams_.push_back(&on);
  for (const int64_t param : finder_.find(grad)) {
    if (param == probe_param_) {
      TRIAD_CHECK(&on == &ctx_.stream, "the gradient of {} came on stream {}", kProbe, on.name());
      sum_of_squares(ctx_, probe_, params_.part(params_.grads(), param));
    }
    for (const int64_t b : plan_.buckets_of(param))
      if (--missing_[static_cast<size_t>(b)] == 0) full(b);
  }
}

void GradReducer::full(int64_t bucket) {
  order_.push_back(bucket);
  std::vector<GraphEvent>& events = filled_[static_cast<size_t>(bucket)];
  for (size_t s = 0; s < streams_.size() && !ctx_.planning; ++s) {
    if (events.size() == s) events.emplace_back(ctx_.device);
    events[s].record(*streams_[s]);
  }
  if (!recorded_) reduce(bucket);
}

void GradReducer::reduce_recorded() {
  for (const int64_t bucket : order_) reduce(bucket);
}

void GradReducer::reduce(int64_t index) {
  const GradBucket& bucket = plan_.buckets()[static_cast<size_t>(index)];
  for (const GraphEvent& event : filled_[static_cast<size_t>(index)]) event.block(comm_.stream());
  const ElementRange e = bucket.elements;
  const Tensor grads = params_.grads().slice(0, e.begin, e.end);
  const Tensor sent = sent_bf16_.empty() ? grads : sent_bf16_.slice(0, 0, e.size());
  if (trace_ != nullptr) trace_->launch(index);
  if (!sent_bf16_.empty()) cast(queue_.ctx(), sent, grads);
  sum(sent, fmt::format("bucket {}", index), bucket.late ? CommCtas::all : ctas_);
  if (!sent_bf16_.empty()) cast(queue_.ctx(), grads, sent);
  const ElementRange held = zero_ ? plan_.shard(bucket) : e;
  const Tensor sums = params_.grads().slice(0, held.begin, held.end);
  if (trace_ != nullptr) trace_->finish(queue_.ctx(), index, sums);
  if (zero_) square_pieces(queue_.ctx(), squares_.slice(0, held.begin / kSumPiece, held.end / kSumPiece), sums);
}

// Sums a bucket over the ranks. If the ranks of a host can access each other's memory: by peer copies and one short
// kernel (rank_sum adds in the order of ranks), which leaves the SMs to concurrent work. Otherwise by NCCL, or on
// the host.
void GradReducer::sum(const Tensor& bucket, const std::string& what, CommCtas ctas) {
  if (ctx_.planning) return;
  const int64_t world = comm_.world();
  if (!sums_by_copies(bucket.numel()))
    return zero_ ? comm_.reduce_scatter(bucket, what, ctas) : comm_.all_reduce(bucket, what, ctas);
  const int64_t part = bucket.numel() / world, begin = comm_.rank() * part;
  const Tensor staging(staging_.data, bucket.dtype, {world, part}, staging_.device);
  const Tensor own = bucket.slice(0, begin, begin + part);
  comm_.all_to_all(bucket, staging.view({world * part}), what);
  rank_sum(queue_.ctx(), own, own, staging, comm_.rank());
  if (!zero_) comm_.all_gather(bucket, what);
}

void GradReducer::finish() {
  if (trace_ != nullptr) trace_->end(queue_.ctx());
}

std::string GradReducer::table() const {
  const DType sent = sent_bf16_.empty() ? params_.grads().dtype : DType::bf16;
  const bool in_two = zero_ || by_copies();
  // In addition to those of the buckets: one collective for the ranks' RankNumbers and, with dist.zero 1, one for the
  // sums of squares of the shards.
  const size_t collectives = plan_.buckets().size() * (in_two ? 2 : 1) + 1 + (zero_ ? 1 : 0);
  std::string out =
      fmt::format("{} buckets, {} collectives a step on {} ranks: {} {}, {:.2f} MiB in all\n", plan_.buckets().size(),
                  collectives, comm_.world(), in_two ? "reduce_scatter and all_gather" : "all_reduce", name_of(sent),
                  static_cast<double>(params_.stored_elements() * size_of(sent)) / kMiB);
  out += "bucket,elements,mib,dtype,width,parameters,first,last\n";
  for (size_t b = 0; b < plan_.buckets().size(); ++b) {
    const GradBucket& bucket = plan_.buckets()[b];
    const auto name = [&](int64_t i) { return params_.specs()[static_cast<size_t>(i)].name; };
    out += fmt::format("{},{},{:.4f},{},{},{},{},{}\n", b, bucket.elements.size(),
                       static_cast<double>(bucket.elements.size() * size_of(sent)) / kMiB, name_of(sent),
                       sums_by_copies(bucket.elements.size())  ? "copies"
                       : bucket.late || ctas_ == CommCtas::all ? "wide"
                                                               : "narrow",
                       bucket.params.size(), bucket.params.empty() ? "padding" : name(bucket.params.front()),
                       bucket.params.empty() ? "padding" : name(bucket.params.back()));
  }
  return out;
}

}  // namespace triad
