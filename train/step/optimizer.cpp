#include "train/step/optimizer.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/fork_join.h"
#include "kernels/ops/cast.h"
#include "train/config/schedule.h"

namespace triad {

namespace {

// All layers' matrix elements, which are contiguous in the flat buffer; none if AdamW updates them.
ElementRange matrices_of(const Params& params, OptimizerKind kind) {
  if (kind != OptimizerKind::muon) return {};
  const Segments& segments = params.segments();
  ElementRange all = segments[0];
  for (int64_t i = 1; segments.is_layer(i); ++i) {
    TRIAD_CHECK(segments[i].begin == all.end, "the matrices of layer {} begin at element {}, after {}", i,
                segments[i].begin, all.end);
    all.end = segments[i].end;
  }
  return all;
}

// dense: without the matrices that a dense step does not use.
MuonPlan plan_of(const Params& params, OptimizerKind kind, int64_t ranks, bool dense) {
  std::vector<MuonMatrix> matrices;
  for (int64_t i = 0; i < params.count(); ++i) {
    const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
    if (is_updated_by_muon(spec, kind) && (!dense || used_by_dense_pass(spec)))
      matrices.push_back({params.offset(i), spec.shape[0], spec.shape[1]});
  }
  return MuonPlan(matrices, ranks);
}

// Elements in parameters that a dense step doesn't use, ascending; adjacent ranges are merged.
std::vector<ElementRange> unused_by_dense_step(const Params& params) {
  std::vector<ElementRange> ranges, merged;
  for (int64_t i = 0; i < params.count(); ++i)
    if (!used_by_dense_pass(params.specs()[static_cast<size_t>(i)])) ranges.push_back(range_of(params, i));
  std::ranges::sort(ranges, {}, &ElementRange::begin);
  for (const ElementRange& range : ranges)
    if (!merged.empty() && merged.back().end == range.begin)
      merged.back().end = range.end;
    else
      merged.push_back(range);
  return merged;
}

// Calls f(range) for the ranges in `all` outside `ranges`, which are ascending.
template <class F>
void for_each_rest(const ElementRange& all, const std::vector<ElementRange>& ranges, F&& f) {
  int64_t at = all.begin;
  for (const ElementRange& range : ranges) {
    if (range.end <= at || range.begin >= all.end) continue;
    if (range.begin > at) f(ElementRange{at, range.begin});
    at = range.end;
  }
  if (at < all.end) f(ElementRange{at, all.end});
}

// The parts without a range's elements; the range may lie inside a part.
Parts without(const Parts& parts, const ElementRange& range) {
  Parts rest;
  for (const Parts::Part& part : parts) {
    const auto [begin, end] = part.elements;
    if (const int64_t until = std::min(end, std::max(begin, range.begin)); until > begin) rest.add({begin, until});
    if (const int64_t from = std::max(begin, std::min(end, range.end)); from < end && range.begin < end)
      rest.add({std::max(from, begin), end});
  }
  return rest;
}

// Split masters' elements joined at a time.
constexpr int64_t kMostJoined = int64_t{1} << 20;

// Whether masters are split. With a weight ring (dist.zero 3) they are only with runtime.offload: without it a rank
// stores its weight shard as masters alone, so no bf16 weight exists that could store part of them.
bool splits_masters(const Config& config, const FlatBuffer& weights) {
  return config.train.master_dtype == MasterDType::split && weights.memory().dtype == DType::bf16 &&
         (!weights.is_windowed() || config.runtime.offload == Offload::optimizer);
}

}  // namespace

Optimizer::Optimizer(Context& ctx, Arena& arena, Params& params, const Config& config, GradReducer* reducer,
                     CommQueue* ranks)
    : params_(params),
      reducer_(reducer),
      parts_(reducer == nullptr ? Parts::whole(params) : reducer->plan().shards()),
      kind_(config.train.optimizer),
      matrices_(matrices_of(params, kind_)),
      square_parts_(matrices_.size() > 0 ? without(parts_, matrices_) : parts_),
      ranks_(ranks),
      split_(splits_masters(config, params.weight_buffer())) {
  TRIAD_CHECK(kind_ != OptimizerKind::muon || config.runtime.offload == Offload::none,
              "train.optimizer muon with runtime.offload {}", word_of(config.runtime.offload));
  const bool windows = params.weight_buffer().is_windowed();
  const DType compute = params.weight_buffer().memory().dtype;
  const auto keeps = [&](State state) {
    if (state != State::parameter) return true;
    return windows || (dtype_of(state, config) != compute && !params.has_master());
  };
  const auto kind_of = [&](State state) {
    return split_ && state == State::parameter ? HostState::Kind(DType::u8, 2)
                                               : HostState::Kind(dtype_of(state, config));
  };
  if (config.runtime.offload == Offload::optimizer) {
    std::vector<HostState::Kind> kinds;
    for (const State state : kStates)
      if (keeps(state)) kinds.push_back(kind_of(state));
    host_.emplace(ctx, arena, HostState::Options{.kinds = kinds, .elements = parts_.size()});
    for (size_t i = 0; State state : kStates)
      if (keeps(state)) kept(state) = host_->whole(i++);
    if (windows) own_weights_ = arena.alloc(MemTag::params, "weights of the shards", compute, {parts_.size()});
  } else {
    const auto alloc = [&](State state, MemTag tag, const char* name) {
      const HostState::Kind kind = kind_of(state);
      if (keeps(state)) kept(state) = arena.alloc(tag, name, kind.dtype, kind.shape(parts(state).size()));
    };
    alloc(State::parameter, MemTag::master, "master weights");
    alloc(State::exp_avg, MemTag::optimizer, "exp_avg");
    alloc(State::exp_avg_sq, MemTag::optimizer, "exp_avg_sq");
    if (windows) own_weights_ = kept(State::parameter);
  }
  if (split_) {
    const int64_t words = TieBits::words_for(parts_.size()), run = std::min(parts_.size(), kMostJoined);
    ties_ = arena.alloc(MemTag::master, "tie bits of master weights", DType::i32, {words});
    joined_ = arena.alloc(MemTag::master, "joined master weights", DType::f32, {run});
    zero(ctx, ties_);
  }
  prepare(ctx, arena, whole_, /*dense=*/false);
  if (std::ranges::any_of(stages_of(config.train), &TrainStage::has_dense_steps))
    prepare(ctx, arena, dense_, /*dense=*/true);
  for (const State state : {State::exp_avg, State::exp_avg_sq})
    for_each_own(ctx, state, [&](const ElementRange&, const Tensor& values) { zero(ctx, values); });
  if (reducer_ != nullptr) gather_.emplace(ctx, params, *reducer_, own_weights_);
}

void Optimizer::prepare(Context& ctx, Arena& arena, Update& update, bool dense) {
  if (dense) update.unused = unused_by_dense_step(params_);
  if (matrices_.size() == 0) return;
  update.muon = plan_of(params_, kind_, ranks_ == nullptr ? 1 : ranks_->world(), dense);
  if (reducer_ != nullptr) return void(update.muon_shards.emplace(ctx, arena, update.muon, *reducer_));
  const auto rows = static_cast<int64_t>(update.muon.pieces().size());
  update.muon_pieces = arena.alloc(MemTag::optimizer, "muon pieces", DType::i64, {rows, MuonPiece::kFields});
  write(ctx, update.muon_pieces, update.muon.pieces().data());
}

DType Optimizer::dtype_of(State state, const Config& config) {
  const bool masters = config.train.master_dtype != MasterDType::none;
  const Precision precision = state != State::parameter ? config.train.moments_dtype
                              : masters                 ? Precision::fp32
                                                        : config.runtime.precision;
  return precision == Precision::bf16 ? DType::bf16 : DType::f32;
}

template <class F>
void Optimizer::for_each_of_adamw(const Update& update, const ElementRange& part, F&& f) const {
  const auto clipped = [&](int64_t begin, int64_t end) {
    return ElementRange{std::max(begin, part.begin), std::min(end, part.end)};
  };
  const int64_t decay_end = params_.decay_end();
  const ElementRange& index = params_.index_range();
  for (const auto& [range, kind] : {std::pair{clipped(0, matrices_.begin), Group{.decays = true}},
                                    {clipped(matrices_.end, index.begin), Group{.decays = true}},
                                    {clipped(index.begin, decay_end), Group{.decays = true, .index = true}},
                                    {clipped(decay_end, index.end), Group{.decays = false, .index = true}},
                                    {clipped(index.end, part.end), Group{.decays = false}}})
    for_each_rest(range, update.unused, [&](const ElementRange& rest) { f(rest, kind); });
}

void Optimizer::for_each_piece(Context& ctx, const Parts::Part& part, const ElementRange& range, const WithStates& f) {
  const Tensor in_params = kept(State::parameter).empty() ? params_.master() : Tensor{};
  const auto parameter = [&](const ElementRange& e) { return in_params.slice(0, e.begin, e.end); };
  if (!host_) {
    Tensor states[kCount];
    for (const State state : kStates) {
      const auto i = static_cast<size_t>(state);
      const Parts::Part* const place = keeps_all(state) ? &part : parts(state).find(range);
      states[i] = kept_[i].empty()   ? parameter(range)
                  : place == nullptr ? Tensor{}
                                     : Parts::of(kept_[i], *place, range);
    }
    return f(range, states);
  }
  const int64_t shift = part.at - part.elements.begin;
  host_->update(ctx, range.begin + shift, range.end + shift,
                [&](std::span<const Tensor> piece, int64_t begin, int64_t end) {
                  const ElementRange elements = {begin - shift, end - shift};
                  Tensor states[kCount];
                  for (size_t i = 0, next = 0; i < kCount; ++i)
                    states[i] = kept_[i].empty() ? parameter(elements) : piece[next++];
                  f(elements, states);
                });
}

Tensor Optimizer::weights_of(const Parts::Part& part, const ElementRange& range) const {
  return params_.weight_buffer().is_windowed() ? Parts::of(own_weights_, part, range) : params_.weights(range);
}

TieBits Optimizer::ties_of(const Parts::Part& part, const ElementRange& range) const {
  return {ties_, split_ ? part.at + range.begin - part.elements.begin : 0};
}

void Optimizer::for_each_run(const Parts::Part& part, const ElementRange& range, const Tensor& remainder,
                             const WithRun& f) const {
  for (int64_t begin = range.begin; begin < range.end; begin += kMostJoined) {
    const ElementRange run = {begin, std::min(begin + kMostJoined, range.end)};
    f(run,
      {remainder.slice(0, run.begin - range.begin, run.end - range.begin), weights_of(part, run), ties_of(part, run)},
      joined_.slice(0, 0, run.size()));
  }
}

void Optimizer::step(Context& ctx, Tensor sums, const Parts& grad_parts, const SquaredNorms& norms,
                     const TrainConfig& c, int64_t step, bool dense) {
  Update& scope = dense ? dense_ : whole_;
  const AdamWOptions options{.lr = learning_rate(c, step),
                             .beta1 = c.beta1,
                             .beta2 = c.beta2,
                             .eps = c.eps,
                             .weight_decay = c.weight_decay,
                             .grad_clip = c.grad_clip,
                             .step = step + 1,
                             .seed = static_cast<uint64_t>(c.seed)};
  const auto update = [&](Context& on, size_t i, const ElementRange& range, const Group& group) {
    AdamWOptions own = options;
    own.weight_decay = group.decays ? c.weight_decay : 0;
    if (group.index) own.lr *= c.index_lr_factor;
    for_each_piece(on, parts_[i], range, [&](const ElementRange& elements, const Tensor(&states)[kCount]) {
      const auto& [parameter, exp_avg, exp_avg_sq] = states;
      const Tensor weights = weights_of(parts_[i], elements);
      const bool rounds = weights.dtype != parameter.dtype;  // else the parameters are the weights, or their copy
      own.first_element = elements.begin;
      adamw(on, parameter, rounds ? weights : Tensor{}, exp_avg, exp_avg_sq, Parts::of(sums, grad_parts[i], elements),
            group.index ? norms.index : norms.grad, own, ties_of(parts_[i], elements));
      if (!rounds && weights.data != parameter.data) copy(on, weights, parameter);
    });
  };
  // In reverse: buckets are in backward order, and the next forward needs the weights in the opposite order.
  const auto update_by_adamw = [&](Context& on) {
    for (size_t i = parts_.count(); i-- > 0;) {
      for_each_of_adamw(scope, parts_[i].elements,
                        [&](const ElementRange& range, const Group& group) { update(on, i, range, group); });
      if (gather_) gather_->updated(static_cast<int64_t>(i));
    }
  };
  // AdamW runs concurrently with Muon, on a side stream. With shards it stays on ctx.stream, since updated() gathers
  // what was queued there.
  std::optional<ForkJoin> adamw_apart;
  if (matrices_.size() > 0) {
    if (!gather_) adamw_apart.emplace(ctx, 0, update_by_adamw);
    update_matrices(ctx, scope, sums, grad_parts, norms.grad, options);
  }
  if (adamw_apart)
    adamw_apart->join();
  else
    update_by_adamw(ctx);
}

void Optimizer::update_matrices(Context& ctx, Update& scope, Tensor sums, const Parts& grad_parts,
                                ConstTensor grad_norm_squared, const AdamWOptions& adamw) {
  const auto tensors_of = [&](size_t i) {
    const ElementRange& range = parts_[i].elements;
    const Tensor parameter = kept(State::parameter).empty() ? params_.master().slice(0, range.begin, range.end)
                                                            : Parts::of(kept(State::parameter), parts_[i]);
    const Tensor weights = weights_of(parts_[i], range);
    return MuonTensors{.param = parameter,
                       .weights = weights.dtype != parameter.dtype ? weights : Tensor{},
                       .m = Parts::of(kept(State::exp_avg), parts_[i]),
                       .grad = Parts::of(sums, grad_parts[i]),
                       .grad_norm_squared = grad_norm_squared,
                       .pieces = scope.muon_pieces,
                       .ties = ties_of(parts_[i], range)};
  };
  const MuonOptions options = {.lr = adamw.lr,
                               .weight_decay = adamw.weight_decay,
                               .grad_clip = adamw.grad_clip,
                               .step = adamw.step,
                               .seed = adamw.seed};
  if (scope.muon_shards) return scope.muon_shards->step(ctx, tensors_of, options);
  muon(ctx, scope.muon, tensors_of(0), options, ranks_ == nullptr ? 0 : ranks_->rank(), [&](const Tensor& parts) {
    ranks_->all_gather(parts, "updates of matrices");
    ranks_->join();
  });
}

void Optimizer::gather(Context& ctx, State state, const WithValues& f) {
  // f may copy the values to other host memory, which is not queued.
  if (host_ && !ctx.planning) host_->synchronize();
  const Tensor values = kept(state).empty() ? params_.master() : kept(state);
  const bool split = split_ && state == State::parameter;
  if (reducer_ == nullptr) {
    for (const Parts::Part& part : parts(state))
      if (split)
        for_each_run(part, part.elements, Parts::of(values, part),
                     [&](const ElementRange& run, const SplitMaster& master, const Tensor& joined) {
                       join_master(ctx, joined, master);
                       f(run, joined);
                     });
      else
        f(part.elements, Parts::of(values, part));
  } else {
    for (size_t i = 0; i < parts_.count(); ++i) {
      const GradBucket& bucket = reducer_->plan().buckets()[i];
      const ElementRange whole = bucket.elements, own = parts_[i].elements;
      const DType dtype = split ? DType::f32 : values.dtype;
      const Tensor gathered(reducer_->staging().data, dtype, {whole.size()}, reducer_->staging().device);
      const auto place_of = [&](const ElementRange& range) {
        return gathered.slice(0, range.begin - whole.begin, range.end - whole.begin);
      };
      if (split)
        join_master(ctx, place_of(own),
                    {Parts::of(values, parts_[i]), weights_of(parts_[i], own), ties_of(parts_[i], own)});
      else if (kept(state).empty())
        copy(ctx, place_of(own), values.slice(0, own.begin, own.end));
      else
        for (const Parts::Part& part : parts(state))
          if (own.contains(part.elements)) copy(ctx, place_of(part.elements), Parts::of(values, part));
      reducer_->gather(bucket, gathered, "state");
      reducer_->queue().join();
      f(whole, gathered);
    }
  }
  if (host_ && !ctx.planning) host_->follow(ctx.stream);
}

void Optimizer::for_each_own(Context& ctx, State state, const WithValues& f) {
  if (!keeps_all(state)) {
    for (const Parts::Part& part : parts(state)) f(part.elements, Parts::of(kept(state), part));
    return;
  }
  for (const Parts::Part& part : parts_)
    for_each_piece(ctx, part, part.elements, [&](const ElementRange& elements, const Tensor(&states)[kCount]) {
      const Tensor& values = states[static_cast<size_t>(state)];
      if (!split_ || state != State::parameter) return f(elements, values);
      for_each_run(part, elements, values,
                   [&](const ElementRange& run, const SplitMaster& master, const Tensor& joined) {
                     join_master(ctx, joined, master);
                     f(run, joined);
                     split_master(ctx, master, joined);
                   });
    });
}

void Optimizer::set(Context& ctx, State state, int64_t begin, std::span<const float> values) {
  const ElementRange range = {begin, begin + static_cast<int64_t>(values.size())};
  const Parts::Part* const part = parts(state).find(range);
  TRIAD_CHECK(part != nullptr, "this rank does not keep the elements [{}, {})", range.begin, range.end);
  if (host_) host_->synchronize();
  const Tensor to =
      kept(state).empty() ? params_.master().slice(0, range.begin, range.end) : Parts::of(kept(state), *part, range);
  if (!split_ || state != State::parameter) return write_floats(ctx, to, values.data());
  for_each_run(*part, range, to, [&](const ElementRange& run, const SplitMaster& master, const Tensor& joined) {
    write_floats(ctx, joined, values.data() + run.begin - range.begin);
    split_master(ctx, master, joined);
  });
  if (host_) ctx.stream.synchronize();  // the remainders are in host memory, where the next call may read them
}

void Optimizer::publish(Context& ctx) {
  for (const Parts::Part& part : parts_)
    if (!split_)  // else the weights are part of the masters
      for_each_piece(ctx, part, part.elements, [&](const ElementRange& elements, const Tensor(&states)[kCount]) {
        const Tensor weights = weights_of(part, elements);
        if (weights.data != states[0].data) cast(ctx, weights, states[0]);
      });
  for (size_t i = parts_.count(); gather_ && i-- > 0;) gather_->updated(static_cast<int64_t>(i));
}

void Optimizer::init(Context& ctx, uint64_t seed) {
  for_each_own(ctx, State::parameter, [&](const ElementRange& elements, const Tensor& values) {
    draw_range(ctx, params_, elements.begin, elements.end, values, seed);
  });
  publish(ctx);
}

}  // namespace triad
