#include "train/dist/grad_reducer.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "kernels/ops/cast.h"
#include "kernels/step/accumulate.h"
#include "kernels/step/rank_sum.h"
#include "kernels/step/reduce.h"

namespace triad {

namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// The parameter whose gradient shows whether this rank's backward was finite: the first norm's gain. Its gradient is
// computed from backward's last dx, which any earlier NaN or infinity reaches.
constexpr const char* kProbe = "blocks.0.norm1.weight";

}  // namespace

GradReducer::GradReducer(Context& ctx, Arena& arena, const Params& params, const RankGroups& ranks,
                         const Config& config, Tensor probe)
    : ctx_(ctx),
      params_(params),
      comm_(ranks.replica),
      replicas_(ranks.replicas),
      sharded_(is_sharded(config, ranks.all.world())),
      windows_(has_grad_windows(config, ranks.all.world())),
      ctas_(comm_ctas_during_backward(config, ranks.all.world())),
      plan_(params, config, ranks.all.rank(), ranks.all.world()),
      queue_(ctx, comm_),
      probe_param_(index_of_param(params, kProbe)),
      probe_(probe),
      finder_(params),
      seed_(static_cast<uint64_t>(config.train.seed)),
      filled_(plan_.buckets().size()) {
  if (!sharded_) {
    parts_ = Parts::whole(params);
  } else if (config.dist.zero == 1) {
    for (const GradBucket& bucket : plan_.buckets()) parts_.add_in_place(plan_.shard(bucket));
  } else {
    parts_ = plan_.shards();
  }
  if (windows_) {
    const int64_t kept = config.dist.zero >= 2 ? parts_.size() : params.stored_elements();
    const DType dtype = config.train.grads_dtype == Precision::bf16 ? DType::bf16 : DType::f32;
    sums_ = arena.alloc(MemTag::grads, "summed gradients", dtype, {kept});
    zero(ctx, sums_);
    for (int64_t i = 0; i < params.segments().count(); ++i)
      summed_.emplace_back(ctx.planning ? Device::cpu() : ctx.device);
    pending_.assign(summed_.size(), false);
  } else {
    sums_ = params.grads();
  }
  if (comm_.world() == 1) return;
  const int64_t largest = plan_.largest();
  if (config.dist.grad_dtype == Precision::bf16)
    sent_bf16_ = arena.alloc(MemTag::comm, "bucket in bf16", DType::bf16, {largest});
  Tensor flags, replicas_flags;
  if (sharded_ || replicas_ != nullptr || !sent_bf16_.empty() || (ctx.device.is_cuda() && comm_.may_share())) {
    staging_ = arena.alloc(MemTag::comm, "room for a bucket", DType::f32, {largest});
    flags = arena.alloc(MemTag::comm, "ranks' meetings", DType::i32, {comm_.world()});
    if (replicas_ != nullptr)
      replicas_flags = arena.alloc(MemTag::comm, "replicas' meetings", DType::i32, {replicas_->world()});
  }
  if (sharded_)
    squares_ = arena.alloc(MemTag::comm, "pieces of the norm", DType::f64, {params.stored_elements() / kSumPiece});
  if (ctx.planning || staging_.empty()) return;
  std::vector<Tensor> shared = {params.grad_buffer().memory(), params.weight_buffer().memory(), staging_};
  if (!sent_bf16_.empty()) shared.push_back(sent_bf16_);
  comm_.share(arena.base(), shared, flags);
  if (replicas_ != nullptr) replicas_->share(arena.base(), shared, replicas_flags);
}

void GradReducer::begin(bool recorded, const MicroStep& micro_step) {
  recorded_ = recorded, micro_step_ = micro_step;
  order_.clear();
  missing_.clear();
  for (const GradBucket& bucket : plan_.buckets()) missing_.push_back(bucket.params.size());
  streams_.clear();
  if (windows_) {
    const Segments& segments = params_.segments();
    buckets_left_.assign(static_cast<size_t>(segments.count()), 0);
    for (const GradBucket& bucket : plan_.buckets()) ++buckets_left_[static_cast<size_t>(segment_of(bucket))];
  }
}

// With a layer ring: the segment that has a bucket's elements.
int64_t GradReducer::segment_of(const GradBucket& bucket) const {
  const Segments& segments = params_.segments();
  int64_t segment = 0;
  while (!segments[segment].contains(bucket.elements)) ++segment;
  return segment;
}

void GradReducer::open(int64_t segment, const Stream& on) {
  if (!windows_) return;
  const Segments& segments = params_.segments();
  const ElementRange place = params_.grad_buffer().place(segment, segments);
  for (int64_t i = 0; i < segments.count(); ++i) {
    if (!pending_[static_cast<size_t>(i)] || !params_.grad_buffer().place(i, segments).overlaps(place)) continue;
    if (!ctx_.planning) summed_[static_cast<size_t>(i)].block(on);
    pending_[static_cast<size_t>(i)] = false;
  }
}

void GradReducer::ready(ConstTensor grad, const Stream& on) {
  if (std::find(streams_.begin(), streams_.end(), &on) == streams_.end()) streams_.push_back(&on);
  for (const int64_t param : finder_.find(grad)) {
    if (param == probe_param_) {
      TRIAD_CHECK(&on == &ctx_.stream, "the gradient of {} came on stream {}", kProbe, on.name());
      sum_of_squares(ctx_, probe_, params_.grads(range_of(params_, param)), /*add=*/!micro_step_.first);
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
  const ElementRange e = bucket.elements, held = sharded_ ? plan_.shard(bucket) : e;
  const Tensor grads = params_.grads(e), own = params_.grads(held);
  const bool traced = trace_ != nullptr && micro_step_.last;
  if (traced) trace_->launch(index);
  if (comm_.world() > 1) {
    const Tensor sent = sent_bf16_.empty() ? grads : sent_bf16_.slice(0, 0, e.size());
    if (!sent_bf16_.empty()) cast(queue_.ctx(), sent, grads);
    sum(grads, sent, fmt::format("bucket {}", index), bucket.late ? CommCtas::all : ctas_);
  }
  const Tensor sums = windows_ ? keep(index, held, own) : own;
  if (traced) trace_->finish(queue_.ctx(), index, sums);
  if (sharded_ && micro_step_.last)
    square_pieces(queue_.ctx(), squares_.slice(0, held.begin / kSumPiece, held.end / kSumPiece), sums);
}

// With a layer ring: adds a micro-step's sum over the ranks to the step's sums, and returns these.
Tensor GradReducer::keep(int64_t index, const ElementRange& held, const Tensor& micro_step_grads) {
  const Parts::Part& part = parts_[sharded_ ? static_cast<size_t>(index) : 0];
  const Tensor sums = Parts::of(sums_, part, held);
  accumulate(queue_.ctx(), sums, micro_step_grads,
             {.add = !micro_step_.first, .seed = seed_, .micro_step = micro_step_.number, .first_element = held.begin});
  const auto segment = static_cast<size_t>(segment_of(plan_.buckets()[static_cast<size_t>(index)]));
  if (--buckets_left_[segment] == 0) {
    if (!ctx_.planning) summed_[segment].record(comm_.stream());
    pending_[segment] = true;
  }
  return sums;
}

// Sums a bucket over the ranks: its gradients as they are sent, into the gradients in f32. With shards, only this
// rank's part has the sum afterwards. If ranks on one host can access each other's memory: by peer copies and one short
// kernel, which leaves the SMs to concurrent work. In bf16 always with this kernel, since NCCL would round every
// partial sum. Otherwise by NCCL, or on the host.
void GradReducer::sum(const Tensor& grads, const Tensor& sent, const std::string& what, CommCtas ctas) {
  if (ctx_.planning) return;
  const bool with_kernel = by_copies() || !sent_bf16_.empty();
  if (!with_kernel && !sharded_ && replicas_ == nullptr) return comm_.all_reduce(grads, what, ctas);
  if (with_kernel)
    sum_own_part(comm_, grads, sent, what);
  else
    comm_.reduce_scatter(grads, what, ctas);
  if (replicas_ != nullptr) {
    const int64_t part = grads.numel() / comm_.world(), begin = comm_.rank() * part;
    const Tensor own = grads.slice(0, begin, begin + part);
    sum_own_part(*replicas_, own, own, what + " over the replicas");
    replicas_->all_gather(own, what + " of the replicas");
  }
  if (!sharded_) comm_.all_gather(grads, what);
}

// Exchanges `sent` [n] between comm's ranks and writes this rank's part, summed, to the same part of grads [n] f32:
// rank_sum() adds in f32 and in rank order.
void GradReducer::sum_own_part(Comm& comm, const Tensor& grads, const Tensor& sent, const std::string& what) {
  const int64_t world = comm.world(), part = grads.numel() / world, begin = comm.rank() * part;
  const auto own = [&](const Tensor& bucket) { return bucket.slice(0, begin, begin + part); };
  const Tensor staging(staging_.data, sent.dtype, {world, part}, staging_.device);
  comm.all_to_all(sent, staging.view({world * part}), what);
  rank_sum(queue_.ctx(), own(grads), own(sent), staging, comm.rank());
}

void GradReducer::finish() {
  if (trace_ != nullptr) trace_->end(queue_.ctx());
}

std::string GradReducer::why_no_copies() const {
  const std::string within = comm_.why_not_shared();
  return within.empty() && replicas_ != nullptr ? replicas_->why_not_shared() : within;
}

std::string GradReducer::table() const {
  const DType sent = sent_bf16_.empty() ? params_.grad_buffer().memory().dtype : DType::bf16;
  const bool in_two = sharded_ || by_copies() || replicas_ != nullptr;
  // Without a layer ring, besides the buckets' collectives: one for the ranks' RankNumbers and, with shards, one for
  // the shards' sums of squares. With one, those that sum a micro-step's gradients.
  const size_t buckets = plan_.buckets().size(), over_replicas = replicas_ == nullptr ? 0 : 2 * buckets,
               collectives = over_replicas +
                             (windows_ && sharded_ ? buckets : buckets * (in_two ? 2 : 1) + 1 + (sharded_ ? 1 : 0));
  std::string out = fmt::format("{}, {} a {} on {} ranks: {} {}, {:.2f} MiB in all\n", counted(buckets, "bucket"),
                                counted(collectives, "collective"), windows_ ? "micro-step" : "step",
                                comm_.world() * (replicas_ == nullptr ? 1 : replicas_->world()),
                                windows_ && sharded_ ? "reduce_scatter"
                                : in_two             ? "reduce_scatter and all_gather"
                                                     : "all_reduce",
                                name_of(sent), static_cast<double>(params_.stored_elements() * size_of(sent)) / kMiB);
  out += "bucket,elements,mib,dtype,width,parameters,first,last\n";
  for (size_t b = 0; b < plan_.buckets().size(); ++b) {
    const GradBucket& bucket = plan_.buckets()[b];
    const auto name = [&](int64_t i) { return params_.specs()[static_cast<size_t>(i)].name; };
    out += fmt::format("{},{},{:.4f},{},{},{},{},{}\n", b, bucket.elements.size(),
                       static_cast<double>(bucket.elements.size() * size_of(sent)) / kMiB, name_of(sent),
                       by_copies()                             ? "copies"
                       : bucket.late || ctas_ == CommCtas::all ? "wide"
                                                               : "narrow",
                       bucket.params.size(), name(bucket.params.front()), name(bucket.params.back()));
  }
  return out;
}

}  // namespace triad
