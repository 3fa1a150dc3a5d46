#include "train/dist/grad_reducer.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/units.h"
#include "kernels/ops/cast.h"
#include "kernels/step/accumulate.h"
#include "kernels/step/rank_sum.h"
#include "kernels/step/reduce.h"

namespace triad {

namespace {

// The parameter whose gradient shows whether this rank's backward was finite: the first norm's gain. Its gradient is
// computed from backward's last dx, which any earlier NaN or infinity reaches. If it is frozen, the first adapter of
// the first layer, the last that backward computes.
std::string probe_of(const Params& params) {
  const std::string gain = "blocks.0.norm1.weight";
  const auto& specs = params.specs();
  if (std::ranges::find(specs, gain, &ParamSpec::name) != specs.end()) return gain;
  const auto adapter = std::ranges::find_if(specs, is_adapter, &ParamSpec::role);
  TRIAD_CHECK(adapter != specs.end(), "{} parameters are trained, and neither {} nor an adapter", specs.size(), gain);
  return adapter->name;
}

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
      probe_param_(index_of_param(params, probe_of(params))),
      probe_(probe),
      between_begun_(ctx.planning ? Device::cpu() : ctx.device),
      between_done_(ctx.planning ? Device::cpu() : ctx.device),
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
  const bool replica_is_one_rank = ranks_of_replica(config, ranks.all.world()) == 1;
  if (config.dist.grad_dtype == Precision::bf16 ||
      (replica_is_one_rank && config.dist.replicas_grad_dtype == Precision::bf16))
    sent_bf16_ = arena.alloc(MemTag::comm, "bucket in bf16", DType::bf16, {largest});
  Tensor flags, replicas_flags;
  if (sharded_ || replicas_ != nullptr || !sent_bf16_.empty() || (ctx.device.is_cuda() && comm_.may_share())) {
    staging_ = arena.alloc(MemTag::comm, "room for a bucket", DType::f32, {largest});
    flags = arena.alloc(MemTag::comm, "ranks' meetings", DType::i32, {comm_.world()});
  }
  if (replicas_ != nullptr) {
    const bool bf16 = config.dist.replicas_grad_dtype == Precision::bf16;
    const int64_t part = largest / comm_.world();
    if (bf16) between_bf16_ = arena.alloc(MemTag::comm, "bucket between replicas in bf16", DType::bf16, {part});
    between_staging_ =
        arena.alloc(MemTag::comm, "room for a bucket between replicas", bf16 ? DType::bf16 : DType::f32, {part});
    replicas_flags = arena.alloc(MemTag::comm, "replicas' meetings", DType::i32, {replicas_->world()});
    between_.emplace(ctx.on(replicas_->stream(), ctx.scratch));
  }
  if (sharded_)
    squares_ = arena.alloc(MemTag::comm, "pieces of the norm", DType::f64, {params.stored_elements() / kSumPiece});
  if (ctx.planning || staging_.empty()) return;
  std::vector<Tensor> shared = {params.grad_buffer().memory(), params.weight_buffer().memory(), staging_};
  for (const Tensor& t : {sent_bf16_, between_staging_, between_bf16_})
    if (!t.empty()) shared.push_back(t);
  comm_.share(arena.base(), shared, flags);
  if (replicas_ != nullptr) replicas_->share(arena.base(), shared, replicas_flags);
}

void GradReducer::begin(bool recorded, const MicroStep& micro_step) {
  complete_under_way();
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
  if (under_way_) {
    const int64_t i = segment_of(plan_.buckets()[static_cast<size_t>(*under_way_)]);
    if (params_.grad_buffer().place(i, segments).overlaps(place)) complete_under_way();
  }
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
      TRIAD_CHECK(&on == &ctx_.stream, "the gradient of {} came on stream {}",
                  params_.specs()[static_cast<size_t>(param)].name, on.name());
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
  const ElementRange e = bucket.elements;
  const Tensor grads = params_.grads(e);
  if (trace_ != nullptr && micro_step_.last) trace_->launch(index);
  if (comm_.world() > 1) {
    const Tensor sent = sent_bf16_.empty() ? grads : sent_bf16_.slice(0, 0, e.size());
    if (!sent_bf16_.empty()) cast(queue_.ctx(), sent, grads);
    sum(grads, sent, fmt::format("bucket {}", index), bucket.late ? CommCtas::all : ctas_);
  }
  if (replicas_ == nullptr) return complete(index);
  begin_between();
  complete_under_way();
  sum_over_replicas(index);
  under_way_ = index;
}

// What follows the sum over all ranks, on the comm stream.
void GradReducer::complete(int64_t index) {
  const GradBucket& bucket = plan_.buckets()[static_cast<size_t>(index)];
  const ElementRange e = bucket.elements, held = sharded_ ? plan_.shard(bucket) : e;
  const bool in_parts = sums_with_kernel() || replicas_ != nullptr;
  if (comm_.world() > 1 && !sharded_ && in_parts && !ctx_.planning)
    comm_.all_gather(params_.grads(e), fmt::format("bucket {}", index));
  const Tensor own = params_.grads(held), sums = windows_ ? keep(index, held, own) : own;
  if (trace_ != nullptr && micro_step_.last) trace_->finish(queue_.ctx(), index, sums);
  if (sharded_ && micro_step_.last)
    square_pieces(queue_.ctx(), squares_.slice(0, held.begin / kSumPiece, held.end / kSumPiece), sums);
}

void GradReducer::complete_under_way() {
  if (!under_way_) return;
  if (!ctx_.planning) between_done_.block(comm_.stream());
  complete(*under_way_);
  under_way_.reset();
}

// The replicas' stream waits for the sums within the replica that were queued so far.
void GradReducer::begin_between() {
  if (ctx_.planning) return;
  between_begun_.record(comm_.stream());
  between_begun_.block(replicas_->stream());
}

// Sums this rank's part of a bucket over the replicas, in their stream. In bf16 each replica's part and then the sum
// are rounded, alike in all replicas; the sum itself is in f32.
void GradReducer::sum_over_replicas(int64_t index) {
  if (ctx_.planning) return;
  const std::string what = fmt::format("bucket {} over the replicas", index),
                    gathered = fmt::format("bucket {} of the replicas", index);
  const Tensor own = params_.grads(plan_.shard(plan_.buckets()[static_cast<size_t>(index)]));
  const int64_t n = own.numel();
  const Tensor staging = between_staging_.slice(0, 0, n);
  if (between_bf16_.empty()) {
    sum_own_part(*replicas_, *between_, own, own, staging, what);
    replicas_->all_gather(own, gathered);
  } else {
    const Tensor sent = between_bf16_.slice(0, 0, n);
    cast(*between_, sent, own);
    sum_own_part(*replicas_, *between_, own, sent, staging, what);
    const int64_t part = n / replicas_->world(), begin = replicas_->rank() * part;
    cast(*between_, sent.slice(0, begin, begin + part), own.slice(0, begin, begin + part));
    replicas_->all_gather(sent, gathered);
    cast(*between_, own, sent);
  }
  between_done_.record(replicas_->stream());
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

// Sums a bucket over the replica's ranks: its gradients as they are sent, into the gradients in f32. Only this rank's
// part has the sum afterwards, but for an all_reduce. If ranks on one host can access each other's memory: by peer
// copies and one short kernel, which leaves the SMs to concurrent work. In bf16 always with this kernel, since NCCL
// would round every partial sum. Otherwise by NCCL, or on the host.
void GradReducer::sum(const Tensor& grads, const Tensor& sent, const std::string& what, CommCtas ctas) {
  if (ctx_.planning) return;
  if (sums_with_kernel())
    sum_own_part(comm_, queue_.ctx(), grads, sent, staging_, what);
  else if (sharded_ || replicas_ != nullptr)
    comm_.reduce_scatter(grads, what, ctas);
  else
    comm_.all_reduce(grads, what, ctas);
}

// Exchanges `sent` [n] between comm's ranks and writes this rank's part, summed, to the same part of grads [n] f32:
// rank_sum() adds in f32 and in rank order. staging: room for n elements.
void GradReducer::sum_own_part(Comm& comm, Context& ctx, const Tensor& grads, const Tensor& sent, const Tensor& staging,
                               const std::string& what) {
  const int64_t world = comm.world(), part = grads.numel() / world, begin = comm.rank() * part;
  const auto own = [&](const Tensor& bucket) { return bucket.slice(0, begin, begin + part); };
  const Tensor others(staging.data, sent.dtype, {world, part}, staging.device);
  comm.all_to_all(sent, others.view({world * part}), what);
  rank_sum(ctx, own(grads), own(sent), others, comm.rank());
}

void GradReducer::finish() {
  complete_under_way();
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
