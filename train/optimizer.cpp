#include "train/optimizer.h"

#include <algorithm>

#include "engine/check.h"
#include "kernels/ops/cast.h"
#include "kernels/step/adamw.h"
#include "train/schedule.h"

namespace triad {

Optimizer::Optimizer(Context& ctx, Arena& arena, Params& params, const Config& config, GradReducer* reducer)
    : params_(params), reducer_(reducer), parts_(reducer == nullptr ? Parts::whole(params) : reducer->plan().shards()) {
  const bool windows = params.weight_buffer().is_windowed();
  if (reducer_ != nullptr && (windows || config.runtime.precision == Precision::bf16))
    master_ = arena.alloc(MemTag::master, "master weights", DType::f32, {parts_.size()});
  exp_avg_ = arena.alloc(MemTag::optimizer, "exp_avg", DType::f32, {parts_.size()});
  exp_avg_sq_ = arena.alloc(MemTag::optimizer, "exp_avg_sq", DType::f32, {parts_.size()});
  zero(ctx, exp_avg_);
  zero(ctx, exp_avg_sq_);
  if (reducer_ != nullptr) gather_.emplace(ctx, params, *reducer_, windows ? master_ : Tensor{});
}

Tensor Optimizer::kept(State state, const Parts::Part& part, const ElementRange& range) const {
  if (state == State::exp_avg) return Parts::of(exp_avg_, part, range);
  if (state == State::exp_avg_sq) return Parts::of(exp_avg_sq_, part, range);
  return master_.empty() ? params_.master().slice(0, range.begin, range.end) : Parts::of(master_, part, range);
}

void Optimizer::step(Context& ctx, Tensor sums, const Parts& grad_parts, ConstTensor grad_norm_squared,
                     const TrainConfig& c, int64_t step) {
  AdamWOptions options{.lr = learning_rate(c, step),
                       .beta1 = c.beta1,
                       .beta2 = c.beta2,
                       .eps = c.eps,
                       .grad_clip = c.grad_clip,
                       .step = step + 1};
  // Whether the update also writes the weights, rounded from masters.
  const bool rounds = !params_.weight_buffer().is_windowed() && (!master_.empty() || params_.has_master());
  const auto update = [&](size_t i, const ElementRange& range, double weight_decay) {
    if (range.size() <= 0) return;
    options.weight_decay = weight_decay;
    const auto of = [&](State state) { return kept(state, parts_[i], range); };
    adamw(ctx, of(State::parameter), rounds ? params_.weights(range) : Tensor{}, of(State::exp_avg),
          of(State::exp_avg_sq), Parts::of(sums, grad_parts[i], range), grad_norm_squared, options);
  };
  // In reverse: buckets are in the order of backward, and the next forward needs the weights in the opposite order.
  for (size_t i = parts_.count(); i-- > 0;) {
    const auto [begin, end] = parts_[i].elements;
    update(i, {begin, std::min(end, params_.decay_end())}, c.weight_decay);
    update(i, {std::max(begin, params_.decay_end()), end}, 0);
    if (gather_) gather_->updated(static_cast<int64_t>(i));
  }
}

void Optimizer::gather(Context& ctx, State state, const WithValues& f) {
  if (reducer_ == nullptr) return f(parts_[0].elements, kept(state, parts_[0], parts_[0].elements));
  for (size_t i = 0; i < parts_.count(); ++i) {
    const GradBucket& bucket = reducer_->plan().buckets()[i];
    const ElementRange whole = bucket.elements, own = parts_[i].elements;
    const Tensor values = reducer_->staging().slice(0, 0, whole.size());
    copy(ctx, values.slice(0, own.begin - whole.begin, own.end - whole.begin), kept(state, parts_[i], own));
    reducer_->gather(bucket, values, "state");
    reducer_->queue().join();
    f(whole, values);
  }
}

void Optimizer::for_each_own(State state, const WithValues& f) {
  for (const Parts::Part& part : parts_) f(part.elements, kept(state, part, part.elements));
}

void Optimizer::set(Context& ctx, State state, int64_t begin, std::span<const float> values) {
  const ElementRange range = {begin, begin + static_cast<int64_t>(values.size())};
  const auto part =
      std::find_if(parts_.begin(), parts_.end(), [&](const Parts::Part& p) { return p.elements.contains(range); });
  TRIAD_CHECK(part != parts_.end(), "this rank does not keep the elements [{}, {})", range.begin, range.end);
  write(ctx, kept(state, *part, range), values.data());
}

void Optimizer::publish(Context& ctx) {
  if (!params_.weight_buffer().is_windowed())
    for (const Parts::Part& part : parts_) {
      const Tensor parameter = kept(State::parameter, part, part.elements), weight = params_.weights(part.elements);
      if (parameter.data != weight.data) cast(ctx, weight, parameter);
    }
  for (size_t i = parts_.count(); gather_ && i-- > 0;) gather_->updated(static_cast<int64_t>(i));
}

void Optimizer::init(Context& ctx, uint64_t seed) {
  for_each_own(State::parameter, [&](const ElementRange& elements, const Tensor& values) {
    draw_range(ctx, params_, elements.begin, elements.end, values, seed);
  });
  publish(ctx);
}

}  // namespace triad
