#include "train/grad_reducer.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/check.h"
#include "kernels/ops/cast.h"
#include "kernels/step/rank_sum.h"
#include "kernels/step/reduce.h"
#include "model/flops.h"

namespace triad {

namespace {

constexpr double kMiB = 1024.0 * 1024.0;
constexpr int64_t kElementAlign = 128;

// The gain of the first norm: its gradient is computed from the last dx of backward, so any non-finite value in a
// rank's backward shows in it.
constexpr const char* kProbe = "blocks.0.norm1.weight";

int64_t index_of_param(const Params& params, const std::string& name) {
  for (int64_t i = 0; i < params.count(); ++i)
    if (params.specs()[static_cast<size_t>(i)].name == name) return i;
  fail("the model has no parameter {}", name);
}

}  // namespace

int64_t bucket_unit(const DistConfig& c, int64_t world) {
  // Shards hold whole pieces of the sum of squares, so that the gradient norm has the same bits as without shards.
  return c.zero == 1 && world > 1 ? kSumPiece * world : kElementAlign;
}

CommCtas comm_ctas_during_backward(const Config& config, int64_t world) {
  constexpr double kFewCtasBytesPerS = 60e9, kFlops = 400e12;  // H200 with NVLink; the ratio is what matters
  const TrainConfig& t = config.train;
  const double backward_s = 2.0 / 3 * training_flops(config.model, t.micro_batch_size, t.seq_len) / kFlops;
  const double element = config.dist.grad_dtype == Precision::bf16 ? sizeof(bf16) : sizeof(float);
  const double bytes = element * static_cast<double>(count_parameters(config.model)) * 2 * (world - 1) / world;
  return bytes / kFewCtasBytesPerS < backward_s / 2 ? CommCtas::few : CommCtas::all;
}

std::vector<GradBucket> plan_buckets(const Params& params, int64_t elements, int64_t unit) {
  const int64_t most = std::max(unit, elements / unit * unit), all = params.stored_elements();
  TRIAD_CHECK(all % unit == 0, "{} stored elements in units of {}", all, unit);
  // The embedding's range is rounded out to whole units: it is complete last, so its neighbours in a unit can wait.
  ElementRange embed = range_of(params, index_of_param(params, "embed.weight"));
  embed.begin = embed.begin / unit * unit;
  embed.end = std::min(align_up(embed.end, unit), all);
  std::vector<GradBucket> buckets;
  const auto cut = [&](int64_t begin, int64_t end, bool late) {  // from the end, where backward begins
    constexpr int64_t kLateTimes = 8;
    const int64_t size = late ? kLateTimes * most : most;
    for (; end > begin; end -= std::min(size, end - begin)) {
      GradBucket bucket{.elements = {std::max(begin, end - size), end}, .params = {}, .late = late};
      for (int64_t i = 0; i < params.count(); ++i) {
        if (range_of(params, i).overlaps(bucket.elements)) bucket.params.push_back(i);
      }
      buckets.push_back(bucket);
    }
  };
  cut(0, embed.begin, /*late=*/false);
  if (!buckets.empty()) buckets.back().late = true;  // the bucket of the first layer
  cut(embed.end, all, /*late=*/true);
  cut(embed.begin, embed.end, /*late=*/true);
  return buckets;
}

GradReducer::GradReducer(Context& ctx, Arena& arena, const Params& params, Comm& comm, const Config& config,
                         Tensor probe)
    : ctx_(ctx),
      comm_ctx_(ctx.on(comm.stream(), ctx.scratch)),
      params_(params),
      comm_(comm),
      zero_(config.dist.zero == 1),
      ctas_(comm_ctas_during_backward(config, comm.world())),
      buckets_(plan_buckets(params, static_cast<int64_t>(config.dist.bucket_mb * kMiB) / size_of(params.grads().dtype),
                            bucket_unit(config.dist, comm.world()))),
      buckets_of_(static_cast<size_t>(params.count())),
      probe_param_(index_of_param(params, kProbe)),
      probe_(probe),
      arrivals_(params),
      filled_(buckets_.size()),
      event_(ctx.planning ? Device::cpu() : ctx.device) {
  int64_t largest = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    largest = std::max(largest, buckets_[b].elements.size());
    for (const int64_t i : buckets_[b].params) buckets_of_[static_cast<size_t>(i)].push_back(static_cast<int64_t>(b));
  }
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
  arrivals_.begin();
  missing_.clear();
  for (const GradBucket& bucket : buckets_) missing_.push_back(bucket.params.size());
  streams_.clear();
  // A bucket that holds only padding is full from the start.
  for (size_t b = 0; b < buckets_.size(); ++b)
    if (missing_[b] == 0) full(static_cast<int64_t>(b));
}

void GradReducer::ready(ConstTensor grad, const Stream& on) {
  const std::vector<int64_t> params = arrivals_.add(grad);
  if (std::find(streams_.begin(), streams_.end(), &on) == streams_.end()) streams_.push_back(&on);
  for (const int64_t param : params) {
    if (param == probe_param_) {
      TRIAD_CHECK(&on == &ctx_.stream, "the gradient of {} came on stream {}", kProbe, on.name());
      sum_of_squares(ctx_, probe_, params_.part(params_.grads(), param));
    }
    for (const int64_t b : buckets_of_[static_cast<size_t>(param)])
      if (--missing_[static_cast<size_t>(b)] == 0) full(b);
  }
}

ElementRange GradReducer::owned(const GradBucket& bucket) const {
  const int64_t part = bucket.elements.size() / comm_.world(), begin = bucket.elements.begin + comm_.rank() * part;
  return {begin, begin + part};
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
  const GradBucket& bucket = buckets_[static_cast<size_t>(index)];
  for (const GraphEvent& event : filled_[static_cast<size_t>(index)]) event.block(comm_.stream());
  const ElementRange e = bucket.elements;
  const Tensor grads = params_.grads().slice(0, e.begin, e.end);
  const Tensor sent = sent_bf16_.empty() ? grads : sent_bf16_.slice(0, 0, e.size());
  if (trace_ != nullptr) trace_->launch(index);
  if (!sent_bf16_.empty()) cast(comm_ctx_, sent, grads);
  sum(sent, fmt::format("bucket {}", index), bucket.late ? CommCtas::all : ctas_);
  if (!sent_bf16_.empty()) cast(comm_ctx_, grads, sent);
  const ElementRange held = zero_ ? owned(bucket) : e;
  const Tensor sums = params_.grads().slice(0, held.begin, held.end);
  if (trace_ != nullptr) trace_->finish(comm_ctx_, index, sums);
  if (zero_) square_pieces(comm_ctx_, squares_.slice(0, held.begin / kSumPiece, held.end / kSumPiece), sums);
}

// Sums a bucket over the ranks: by peer copies and one short kernel where the ranks of a host can access each other's
// memory, which leaves the SMs to concurrent work; else by NCCL or on the host. rank_sum adds in the order of ranks.
void GradReducer::sum(const Tensor& bucket, const std::string& what, CommCtas ctas) {
  if (ctx_.planning) return;
  const int64_t world = comm_.world();
  if (!sums_by_copies(bucket.numel()))
    return zero_ ? comm_.reduce_scatter(bucket, what, ctas) : comm_.all_reduce(bucket, what, ctas);
  const int64_t part = bucket.numel() / world, begin = comm_.rank() * part;
  const Tensor staging(staging_.data, bucket.dtype, {world, part}, staging_.device);
  const Tensor own = bucket.slice(0, begin, begin + part);
  comm_.all_to_all(bucket, staging.view({world * part}), what);
  rank_sum(comm_ctx_, own, own, staging, comm_.rank());
  if (!zero_) comm_.all_gather(bucket, what);
}

void GradReducer::finish() {
  arrivals_.require_all();
  if (trace_ != nullptr) trace_->end(comm_ctx_);
}

const Stream& GradReducer::gather(const GradBucket& bucket, Tensor values, const char* what) {
  comm_waits_for(ctx_.stream);
  if (!ctx_.planning) comm_.all_gather(values, fmt::format("{} of bucket {}", what, index_of(bucket)));
  return comm_.stream();
}
void GradReducer::finish_gather() { wait_for_comm(); }

void GradReducer::comm_waits_for(const Stream& stream) {
  if (ctx_.planning) return;
  event_.record(stream);
  event_.block(comm_.stream());
}

void GradReducer::wait_for_comm() {
  if (ctx_.planning) return;
  event_.record(comm_.stream());
  event_.block(ctx_.stream);
}

std::string GradReducer::table() const {
  const DType sent = sent_bf16_.empty() ? params_.grads().dtype : DType::bf16;
  const bool in_two = zero_ || by_copies();
  const size_t collectives =
      buckets_.size() * (in_two ? 2 : 1) + 1 + (zero_ ? 1 : 0);  // + the ranks' numbers, + the norm
  std::string out =
      fmt::format("{} buckets, {} collectives a step on {} ranks: {} {}, {:.2f} MiB in all\n", buckets_.size(),
                  collectives, comm_.world(), in_two ? "reduce_scatter and all_gather" : "all_reduce", name_of(sent),
                  static_cast<double>(params_.stored_elements() * size_of(sent)) / kMiB);
  out += "bucket,elements,mib,dtype,width,parameters,first,last\n";
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const GradBucket& bucket = buckets_[b];
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
