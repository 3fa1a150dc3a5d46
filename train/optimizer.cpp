#include "train/optimizer.h"

#include <algorithm>

#include "kernels/step/adamw.h"
#include "train/schedule.h"

namespace triad {

namespace {
Tensor part_of(const Tensor& whole, const ElementRange& e) { return whole.slice(0, e.begin, e.end); }
}  // namespace

Optimizer::Optimizer(Context& ctx, Arena& arena, const Params& params, GradReducer* reducer) : reducer_(reducer) {
  int64_t kept = 0;
  if (reducer_ == nullptr) {
    parts_.push_back({.elements = {0, params.stored_elements()}});
    kept = params.stored_elements();
  } else {
    for (const GradBucket& bucket : reducer_->plan().buckets()) {
      parts_.push_back({.elements = reducer_->plan().shard(bucket), .moments = kept, .bucket = &bucket});
      kept += parts_.back().elements.size();
    }
    gather_.emplace(ctx, params, *reducer_);
  }
  exp_avg_ = arena.alloc(MemTag::optimizer, "exp_avg", DType::f32, {kept});
  exp_avg_sq_ = arena.alloc(MemTag::optimizer, "exp_avg_sq", DType::f32, {kept});
  zero(ctx, exp_avg_);
  zero(ctx, exp_avg_sq_);
}

void Optimizer::step(Context& ctx, Params& params, ConstTensor grad_norm_squared, const TrainConfig& c, int64_t step) {
  AdamWOptions options{.lr = learning_rate(c, step),
                       .beta1 = c.beta1,
                       .beta2 = c.beta2,
                       .eps = c.eps,
                       .grad_clip = c.grad_clip,
                       .step = step + 1};
  const auto update = [&](const Part& part, int64_t begin, int64_t end, double weight_decay) {
    if (begin >= end) return;
    options.weight_decay = weight_decay;
    const auto of = [&](const Tensor& whole) { return part_of(whole, {begin, end}); };
    const int64_t shift = part.moments - part.elements.begin;
    const auto moment = [&](const Tensor& kept) { return kept.slice(0, begin + shift, end + shift); };
    adamw(ctx, of(params.master()), params.has_master() ? of(params.weights()) : Tensor{}, moment(exp_avg_),
          moment(exp_avg_sq_), of(params.grads()), grad_norm_squared, options);
  };
  // In reverse: buckets are in the order of backward, and the next forward needs the weights in the opposite order.
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
    const auto [begin, end] = part->elements;
    update(*part, begin, std::min(end, params.decay_end()), c.weight_decay);
    update(*part, std::max(begin, params.decay_end()), end, 0);
    if (gather_) gather_->start(*part->bucket);
  }
}

std::vector<float> Optimizer::gather(Context& ctx, const Tensor& moment, int64_t whole_elements) {
  std::vector<float> host(static_cast<size_t>(whole_elements));
  for (const Part& part : parts_) {
    const ElementRange whole = part.bucket->elements, own = part.elements;
    const Tensor bucket = reducer_->staging().slice(0, 0, whole.size());
    copy(ctx, bucket.slice(0, own.begin - whole.begin, own.end - whole.begin),
         moment.slice(0, part.moments, part.moments + own.size()));
    reducer_->gather(*part.bucket, bucket, "moments");
    reducer_->queue().join();
    read(ctx, host.data() + whole.begin, bucket);
  }
  return host;
}

void Optimizer::gather_master(Params& params) {
  if (reducer_ == nullptr) return;
  if (!params.has_master()) return gather_->finish();
  for (const Part& part : parts_)
    reducer_->gather(*part.bucket, part_of(params.master(), part.bucket->elements), "master weights");
  reducer_->queue().join();
}

Optimizer::Moments Optimizer::gather_moments(Context& ctx, const Params& params) {
  if (reducer_ == nullptr) return {exp_avg_, exp_avg_sq_, {}, {}};
  Moments m;
  m.host_avg = gather(ctx, exp_avg_, params.stored_elements());
  m.host_avg_sq = gather(ctx, exp_avg_sq_, params.stored_elements());
  const auto view = [&](std::vector<float>& host) {
    return Tensor(reinterpret_cast<std::byte*>(host.data()), DType::f32, {params.stored_elements()}, Device::cpu());
  };
  m.exp_avg = view(m.host_avg), m.exp_avg_sq = view(m.host_avg_sq);
  return m;
}

void Optimizer::set(Context& ctx, const std::vector<float>& exp_avg, const std::vector<float>& exp_avg_sq) {
  for (const Part& part : parts_) {
    const auto kept = [&](const Tensor& moment) {
      return moment.slice(0, part.moments, part.moments + part.elements.size());
    };
    write(ctx, kept(exp_avg_), exp_avg.data() + part.elements.begin);
    write(ctx, kept(exp_avg_sq_), exp_avg_sq.data() + part.elements.begin);
  }
}

}  // namespace triad
