#include "train/step/train_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "engine/check.h"
#include "engine/process/progress.h"
#include "kernels/ops/cast_e4m3.h"
#include "kernels/ops/matmul.h"
#include "kernels/step/reduce.h"
#include "kernels/step/step_guard.h"
#include "train/config/device_choice.h"

namespace triad {

namespace {

// [1] f64: one of a rank's numbers (RankNumbers).
Tensor own_number(const Tensor& ranks, int64_t rank, int64_t which) { return ranks[rank].slice(0, which, which + 1); }

// Per rank, behind RankNumbers in a ranks_ row: statistics of gates and selection lists, losses of the index, and
// counts of e4m3 casts.
int64_t stats_numbers(const Config& config) {
  return config.log.stats && config.model.has_lists() ? config.model.n_layers * NsaStats::count : 0;
}
int64_t index_numbers(const Config& config) {
  return config.log.stats && config.model.has_index() ? config.model.n_layers : 0;
}
int64_t fp8_numbers(const Config& config) {
  const bool any = std::ranges::find(config.fp8_layers, true) != config.fp8_layers.end();
  return config.log.stats && any ? int64_t{Fp8Role::count} * E4m3Counts::count : 0;
}
int64_t layer_numbers(const Config& config) {
  return stats_numbers(config) + index_numbers(config) + fp8_numbers(config);
}

// With shards, each rank checks only its own sums: the smallest bad tensor's index over all ranks, -1 if none.
int64_t first_bad_of_all(Comm& comm, int64_t bad) {
  int64_t first = -1;
  for (const int64_t other : comm.all_gather_host(bad, "the first bad tensor"))
    if (other >= 0 && (first < 0 || other < first)) first = other;
  return first;
}

// The tokens of this rank.
SequenceLayout layout_of(const Context& ctx, const Config& config, int64_t seq_len, const Comm* comm,
                         int64_t planned_rank) {
  const int64_t ranks = config.dist.context, world = comm == nullptr ? 1 : comm->world();
  check_ranks(config, world);
  const int64_t rank = ctx.planning ? planned_rank : comm == nullptr ? 0 : comm->rank();
  return SequenceLayout::of(seq_len, ranks, rank, ctx.device, config.model.tokens_per_list());
}

}  // namespace

TrainStep::TrainStep(Runtime& runtime, const Config& config, Comm* comm, int64_t most_documents, int64_t planned_rank)
    : runtime_(runtime),
      ctx_(runtime.ctx()),
      config_(config),
      comm_(comm),
      world_(comm == nullptr ? 1 : comm->world()),
      sequence_layout_(layout_of(ctx_, config, config.train.longest_seq_len(), comm, planned_rank)),
      group_(sequence_layout_.shared() ? std::make_optional<SequenceGroup>(
                                             ctx_, comm->group(static_cast<int>(config.dist.context)), sequence_layout_)
                                       : std::nullopt),
      model_(ctx_, runtime.arena(), config.model,
             {.dtype = compute_dtype(config.runtime.precision),
              .training = true,
              .max_seq_len = sequence_layout_.tokens(),
              .shard_elements = segment_unit(world_),
              .master = !sharded() && config.train.master_dtype == MasterDType::fp32 &&
                        config.runtime.offload == Offload::none,
              .weight_windows = has_weight_windows(config, world_),
              .grad_windows = windows(),
              .group = group_ ? &*group_ : nullptr,
              .fp8_layers = config.fp8_layers,
              .lora = config.train.lora}),
      ranks_(world_ == 1 ? Tensor{}
                         : runtime.arena().alloc(MemTag::comm, "the ranks' numbers", DType::f64,
                                                 {world_, RankNumbers::count + layer_numbers(config)})),
      layer_numbers_(make_layer_numbers()),
      alone_(comm == nullptr && windows() ? make_self_comm(ctx_.device) : nullptr),
      groups_(make_groups()),
      reducer_(make_reducer()),
      optimizer_(ctx_, runtime.arena(), model_.params(), config, sharded() ? reducer_.get() : nullptr,
                 world_ == 1 ? nullptr : &reducer_->queue()),
      stats_(make_stats()),
      fp8_counts_(fp8_numbers(config) == 0 ? Tensor{}
                                           : runtime.arena().alloc(MemTag::workspace, "counts of fp8 casts", DType::f64,
                                                                   {Fp8Role::count, E4m3Counts::count})),
      index_sample_(make_index_sample()),
      ledger_(ctx_, runtime.arena(), model_.params(), sums(), grad_parts()),
      trace_(ctx_),
      forms_(make_forms(most_documents, planned_rank)),
      asserts_(config.runtime.asserts ? std::make_unique<Asserts>(runtime.arena()) : nullptr),
      numbers_(runtime.arena().alloc(MemTag::workspace, "step numbers", DType::f64, {StepNumbers::count})),
      eval_loss_(runtime.arena().alloc(MemTag::workspace, "evaluation loss", DType::f64, {1})),
      scales_{.loss = runtime.arena().alloc(MemTag::io, "loss scale", DType::f64, {1}),
              .index = config.model.has_index() ? runtime.arena().alloc(MemTag::io, "index loss scale", DType::f64, {1})
                                                : Tensor{}},
      grad_ranges_(make_grad_ranges()) {
  if (world_ > 1 && config.log.diagnoses("buckets")) {
    bucket_trace_ = std::make_unique<BucketTrace>(ctx_, runtime.arena(), *comm,
                                                  static_cast<int64_t>(reducer_->plan().buckets().size()),
                                                  /*shared=*/!sharded(), kMaxQueued);
    reducer_->trace(bucket_trace_.get());
  }
  model_.watch(asserts_.get());
  triad::zero(ctx_, numbers_);
  triad::zero(ctx_, model_.params().grad_buffer().memory());  // no op writes the padding between gradients
  if (ctx_.planning) return;
  if (group_ && records_graphs() && !group_->can_record())
    fail_usage("dist.context is {}: with runtime.cuda_graph the ranks must be connected by NCCL, not by {}",
               config.dist.context, comm->name());
  int64_t batch_bytes = 0;
  for (const Form& form : forms_) batch_bytes = std::max(batch_bytes, BatchRing::bytes(form.act, scales_));
  batches_.emplace(ctx_.device, batch_bytes);
  const StepResults::Tensors tensors = {numbers_, asserts_ ? asserts_->first() : Tensor{}, ledger_.norms(),
                                        all_layer_numbers()};
  results_.emplace(ctx_.device, tensors, world_, sharded());
}

std::deque<TrainStep::Form> TrainStep::make_forms(int64_t most_documents, int64_t planned_rank) {
  std::vector<TrainStage> different;  // each form's first stage
  for (const TrainStage& stage : stages_of(config_.train))
    if (std::ranges::none_of(different, [&](const TrainStage& other) {
          return stage.seq_len == other.seq_len && stage.micro_batch_size == other.micro_batch_size;
        }))
      different.push_back(stage);
  const auto alloc_form = [&](const TrainStage& stage, const Activations::AllocActivation& alloc) {
    const SequenceLayout layout = layout_of(ctx_, config_, stage.seq_len, comm_, planned_rank);
    return Activations(alloc, config_.model, stage.micro_batch_size, stage.seq_len, model_.dtype(), /*keep=*/true,
                       config_.recompute, most_documents, layout);
  };
  const auto from = [](Arena& arena) {
    return [&arena](MemTag tag, const std::string& name, DType dtype, const Shape& shape, int64_t) {
      return arena.alloc(tag, name, dtype, shape);
    };
  };
  std::optional<LentGrads> lent;
  if (lends_grads()) lent.emplace(model_.params());
  const auto alloc = [&](MemTag tag, const std::string& name, DType dtype, const Shape& shape, int64_t layer) {
    const Tensor in_grads = lent && layer != Activations::kNoLayer ? lent->take(dtype, shape, layer) : Tensor{};
    return in_grads.empty() ? runtime_.arena().alloc(tag, name, dtype, shape) : in_grads;
  };
  ActivationMemory memory(alloc);
  for (const TrainStage& stage : different) {
    Arena planned = Arena::planned(ctx_.device);
    alloc_form(stage, from(planned));
    memory.reserve(planned);
  }
  const auto shared = [&](MemTag tag, const std::string& name, DType dtype, const Shape& shape, int64_t layer) {
    return memory.take(tag, name, dtype, shape, layer);
  };
  std::deque<Form> forms;
  for (const TrainStage& stage : different) {
    Activations act = different.size() == 1 ? alloc_form(stage, alloc) : alloc_form(stage, shared);
    forms.push_back({stage.micro_batch_size, stage.seq_len, std::move(act), MicroStepGraphs(ctx_.device)});
  }
  return forms;
}

void TrainStep::enter(const TrainStage& stage) {
  const auto form = std::ranges::find_if(
      forms_, [&](const Form& f) { return f.sequences == stage.micro_batch_size && f.seq_len == stage.seq_len; });
  TRIAD_CHECK(form != forms_.end(), "a stage of {} x {} tokens, which no stage of the config has",
              stage.micro_batch_size, stage.seq_len);
  form_ = static_cast<size_t>(form - forms_.begin());
}

std::optional<RankGroups> TrainStep::make_groups() {
  if (comm_ == nullptr && alone_ == nullptr) return {};
  return std::optional<RankGroups>(std::in_place, comm_ != nullptr ? *comm_ : *alone_, config_);
}

std::unique_ptr<GradReducer> TrainStep::make_reducer() {
  if (world_ == 1 && !windows()) return nullptr;
  Arena& arena = runtime_.arena();
  const Tensor probe = world_ == 1 ? arena.alloc(MemTag::workspace, "probe", DType::f64, {1})
                                   : own_number(ranks_, comm_->rank(), RankNumbers::probe);
  return std::make_unique<GradReducer>(ctx_, arena, model_.params(), *groups_, config_, probe);
}

Tensor TrainStep::make_grad_ranges() {
  const Params& params = model_.params();
  const Parts parts = grad_parts();
  std::vector<int64_t> ranges;
  for (int64_t i = 0; i < params.count(); ++i) {
    const int64_t begin = params.offset(i), end = begin + params.specs()[static_cast<size_t>(i)].shape.numel();
    for (const Parts::Part& part : parts) {
      const ElementRange own = {std::max(begin, part.elements.begin), std::min(end, part.elements.end)};
      if (own.size() <= 0) continue;
      ranges.insert(ranges.end(), {own.begin - part.elements.begin + part.at, own.size()});
      param_of_range_.push_back(i);
    }
  }
  // Room for as many ranges as any rank can have, so that all ranks allocate the same.
  const int64_t most = params.count() + static_cast<int64_t>(parts.count());
  const Tensor tensor = runtime_.arena().alloc(MemTag::workspace, "gradient parts", DType::i64, {most, 2});
  const Tensor used = tensor.slice(0, 0, static_cast<int64_t>(param_of_range_.size()));
  write(ctx_, used, ranges.data());
  return used;
}

Tensor TrainStep::make_layer_numbers() {
  const int64_t count = layer_numbers(config_);
  if (count == 0) return {};
  if (world_ == 1) return runtime_.arena().alloc(MemTag::workspace, "gates and lists", DType::f64, {count});
  return ranks_[comm_->rank()].slice(0, RankNumbers::count, RankNumbers::count + count);
}

std::unique_ptr<LayerStats> TrainStep::make_stats() {
  const int64_t count = stats_numbers(config_), layers = config_.model.n_layers;
  if (count == 0) return nullptr;
  return std::make_unique<LayerStats>(runtime_.arena(), config_.model,
                                      layer_numbers_.slice(0, 0, count).view({layers, NsaStats::count}));
}

std::unique_ptr<IndexSample> TrainStep::make_index_sample() {
  if (index_numbers(config_) == 0 || config_.train.eval_every == 0 || group_) return nullptr;
  return std::make_unique<IndexSample>(runtime_.arena(), config_.model, model_.dtype());
}

Tensor TrainStep::all_layer_numbers() const { return world_ == 1 || layer_numbers_.empty() ? layer_numbers_ : ranks_; }

// Merges the ranks' statistics in the order of ranks.
std::vector<NsaStats> TrainStep::read_stats(const std::byte* copied) const {
  std::vector<NsaStats> layers(static_cast<size_t>(config_.model.n_layers));
  if (world_ > 1) copied += RankNumbers::count * sizeof(double);
  for (int64_t rank = 0; rank < world_; ++rank)
    for (int64_t i = 0; i < config_.model.n_layers; ++i) {
      NsaStats its;
      std::memcpy(its.at, copied + rank * ranks_.stride[0] * static_cast<int64_t>(sizeof(double)) + i * sizeof its,
                  sizeof its);
      layers[static_cast<size_t>(i)].merge(its);
    }
  return layers;
}

// Those of the layer numbers, each summed over the ranks in their order.
std::vector<double> TrainStep::read_sums(const std::byte* copied, int64_t first, int64_t count) const {
  std::vector<double> sums(static_cast<size_t>(count));
  if (world_ > 1) copied += RankNumbers::count * sizeof(double);
  for (int64_t rank = 0; rank < world_; ++rank)
    for (size_t i = 0; i < sums.size(); ++i) {
      double one = 0;
      const auto at = static_cast<size_t>(rank * ranks_.stride[0] + first) + i;
      std::memcpy(&one, copied + at * sizeof one, sizeof one);
      sums[i] += one;
    }
  return sums;
}

void TrainStep::begin(bool trace, int64_t step) {
  step_ = step, micro_steps_ = 0;
  const TrainStage stage = stage_at(config_.train, step);
  enter(stage);
  dense_ = config_.model.has_nsa() && stage.is_dense(step);
  if (!ctx_.planning) results_->open().began.record(ctx_.stream);
  trace_wanted_ = trace && !ctx_.planning;
  if (comm_ != nullptr) comm_->take_waited_ms();  // resets the counter: waits between steps do not count
  if (asserts_) asserts_->clear(ctx_);
  if (stats_) stats_->clear(ctx_);
  if (!fp8_counts_.empty()) triad::zero(ctx_, fp8_counts_);
  if (!windows()) triad::zero(ctx_, model_.params().added_grads());
  triad::zero(ctx_, numbers_.slice(0, StepNumbers::loss, StepNumbers::index_loss + 1));
  if (config_.model.has_index()) triad::zero(ctx_, model_.index_loss());
  if (sharded()) triad::zero(ctx_, reducer_->squares());
}

void TrainStep::upload(const HostBatch& batch, int64_t step_positions, int64_t index_rows) {
  if (ctx_.planning) return;
  const auto share = [](double weight, int64_t of) { return of > 0 ? weight / static_cast<double>(of) : 0; };
  const StepScales scales{.loss = share(1, step_positions),
                          .index = share(config_.model.nsa.index_loss, index_rows * config_.model.n_kv_groups)};
  batches_->upload(ctx_, form().act, scales_, batch, form().seq_len, scales);
}

void TrainStep::forward_backward(bool first, GradSink* sink) {
  const bool weight_windows = has_weight_windows(config_, world_);
  Activations& act = form().act;
  model_.attend_densely(dense_);
  model_.count_fp8(fp8_counts_);
  model_.forward(ctx_, act, dense_ ? nullptr : stats_.get(), first || weight_windows ? optimizer_.weights() : nullptr);
  ledger_.begin(sink);
  const bool trace = std::exchange(trace_wanted_, false);
  if (trace) trace_.start(results_->open().index);
  const LossScales scales(LossScale(scales_.loss), scales_.index.empty() ? LossScale(0.0) : LossScale(scales_.index));
  model_.loss_and_backward(ctx_, act, scales, first, &ledger_, optimizer_.weights());
  if (trace) trace_.stop();
  sum(ctx_, numbers_.slice(0, StepNumbers::loss, StepNumbers::loss + 1), act.row_loss, /*add=*/true);
}

// With a layer ring, work on the comm stream has to end before later work in the same micro-step begins, which a graph
// cannot wait for.
bool TrainStep::records_graphs() const {
  return config_.runtime.cuda_graph && ctx_.device.is_cuda() && !ctx_.planning && !windows();
}

void TrainStep::micro_step(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t step_positions,
                           std::span<const int32_t> bounds, const IndexRows& index_rows) {
  const Form& now = form();
  index_rows_ = index_rows.in_step > 0 ? index_rows.in_step
                                       : now.sequences * now.seq_len * config_.train.accumulate_grad_batches *
                                             (world_ / config_.dist.context);
  upload({tokens, targets, bounds, index_rows.padding_begin}, step_positions, index_rows_);
  TRIAD_CHECK(micro_steps_ == 0 || !lends_grads(),
              "a second micro-step in a step of train.accumulate_grad_batches 1: it would overwrite gradients");
  const bool first = micro_steps_++ == 0, last = micro_steps_ == config_.train.accumulate_grad_batches;
  GradReducer* const sums = last || windows() ? reducer_.get() : nullptr;
  const auto work = [&] { forward_backward(first, sums); };
  const auto begin_sums = [&](bool recorded) {
    if (sums != nullptr)
      sums->begin(recorded, {.first = first || !windows(),
                             .last = last,
                             .number = step_ * config_.train.accumulate_grad_batches + micro_steps_ - 1});
  };
  if (last && bucket_trace_) bucket_trace_->begin(ctx_.stream);
  MicroStepGraphs::Recording& recording = form().graphs.recording(dense_, first, /*summed=*/sums != nullptr);
  if (trace_wanted_ || !records_graphs() || !recording.ran_before()) {  // a graph's ops cannot be timed one by one
    begin_sums(/*recorded=*/false);
    return work();
  }
  if (!recording.graph.recorded()) {
    begin_sums(/*recorded=*/true);
    const auto record = [&] { recording.graph.record(ctx_, work); };
    group_ ? group_->record(record) : record();
  }
  const auto launch = [&] { recording.graph.launch(ctx_.stream); };
  group_ ? group_->launch(ctx_, launch) : launch();
  if (sums != nullptr) sums->reduce_recorded();
}

void TrainStep::forget_graphs() {
  for (Form& form : forms_) form.graphs.clear();
}

void TrainStep::sum_over_ranks(bool stop) {
  const auto own = [&](int64_t which) { return own_number(ranks_, comm_->rank(), which); };
  const auto number = [&](int64_t which) { return numbers_.slice(0, which, which + 1); };
  copy(ctx_, own(RankNumbers::loss), number(StepNumbers::loss));
  copy(ctx_, own(RankNumbers::index_loss), number(StepNumbers::index_loss));
  constexpr int kFlagByte = 0x3f;  // an f64 whose eight bytes have this value is finite and not 0
  const Tensor flag = own(RankNumbers::stop);
  if (!ctx_.planning) backend::fill(flag.data, flag.device, stop ? kFlagByte : 0, flag.bytes(), ctx_.stream.handle());
  reducer_->finish();
  reducer_->queue().run([&] {
    comm_->all_gather(ranks_, "the ranks' numbers");
    if (sharded()) shards()->all_reduce(reducer_->squares(), "the gradient's norm");  // exact: all other addends are 0
    results_->open().summed.record(comm_->stream());
  });
}

void TrainStep::measure_gradients() {
  ledger_.measure(ctx_);
  if (sharded()) reducer_->queue().run([&] { shards()->all_reduce(ledger_.norms(), "the gradients' norms"); });
}

// The gradient's squared norm without a taught index, and the index's. With shards the pieces are the same, and so the
// bits.
void TrainStep::sum_squares() {
  const auto squares = [&](int64_t which, const ElementRange& range, bool add) {
    const Tensor out = numbers_.slice(0, which, which + 1);
    if (sharded())
      sum_pieces(ctx_, out, reducer_->squares().slice(0, range.begin / kSumPiece, range.end / kSumPiece), add);
    else
      sum_of_squares(ctx_, out, sums().slice(0, range.begin, range.end), add);
  };
  const int64_t all = model_.params().stored_elements();
  if (!config_.model.has_index()) return squares(StepNumbers::norm_squared, {0, all}, /*add=*/false);
  const ElementRange& index = model_.params().index_range();
  squares(StepNumbers::norm_squared, {0, index.begin}, /*add=*/false);
  squares(StepNumbers::norm_squared, {index.end, all}, /*add=*/true);
  squares(StepNumbers::index_norm_squared, index, /*add=*/false);
}

// Without any target, AdamW would still move the weights by its moments and the weight decay.
void TrainStep::forbid_update() {
  constexpr int kNanByte = 0xff;  // an f64 made of these bytes is a NaN
  const Tensor applied = numbers_.slice(0, StepNumbers::applied, StepNumbers::index_applied + 1);
  if (!ctx_.planning) backend::fill(applied.data, applied.device, kNanByte, applied.bytes(), ctx_.stream.handle());
}

void TrainStep::update(int64_t step, int64_t step_positions, bool stop, bool measure) {
  TRIAD_CHECK(ctx_.planning || !results_->full(), "{} steps are queued without a look at their results", kMaxQueued);
  const auto number = [&](int64_t i) { return numbers_.slice(0, i, i + 1); };
  report_stage(ctx_, Stage::update);
  if (!ctx_.planning) {
    results_->open().computed.record(ctx_.stream);
    results_->open().inside_ms = comm_ == nullptr ? 0 : comm_->take_waited_ms();
  }
  if (micro_steps_ > 0) ledger_.require_all();
  TRIAD_CHECK(world_ == 1 || ctx_.planning || micro_steps_ == config_.train.accumulate_grad_batches,
              "{} micro-steps in a step of {}: the gradients of the last one are summed over the ranks", micro_steps_,
              config_.train.accumulate_grad_batches);
  if (stats_ && !dense_) stats_->finish(ctx_);
  if (config_.model.has_index()) sum_pieces(ctx_, number(StepNumbers::index_loss), model_.index_loss());
  if (const int64_t first = stats_numbers(config_), count = index_numbers(config_); count > 0)
    copy(ctx_, layer_numbers_.slice(0, first, first + count), model_.index_loss());
  if (const int64_t end = layer_numbers(config_), count = fp8_numbers(config_); count > 0)
    copy(ctx_, layer_numbers_.slice(0, end - count, end), fp8_counts_.view({count}));
  if (world_ > 1)
    sum_over_ranks(stop);
  else if (reducer_)
    reducer_->queue().join();
  if (measure || ctx_.planning) measure_gradients();  // a plan always includes its memory
  sum_squares();
  judge_step(ctx_, numbers_, sums(), grad_ranges_, ranks_.empty() ? Tensor{} : ranks_.slice(1, 0, RankNumbers::count),
             config_.train.on_nonfinite == OnNonfinite::stop);
  if (step_positions == 0) forbid_update();
  optimizer_.step(ctx_, sums(), grad_parts(), {number(StepNumbers::applied), number(StepNumbers::index_applied)},
                  config_.train, step, dense_);
  if (ctx_.planning) return;
  StepResults::Slot& slot = results_->open();
  if (comm_ != nullptr) slot.host_ms = slot.inside_ms + comm_->take_waited_ms();
  results_->push(
      ctx_,
      {.number = step, .positions = step_positions, .index_rows = index_rows_, .measured = measure, .dense = dense_});
  if (sharded()) slot.gathered.record(comm_->stream());
}

TrainStep::Result TrainStep::result() {
  if (ctx_.planning) return {};
  const StepResults::Slot& slot = results_->pop();
  const StepResults::Step& step = slot.step;
  double numbers[StepNumbers::count];
  std::memcpy(numbers, results_->numbers(slot), sizeof numbers);
  if (asserts_) {
    int64_t first = kNoViolation;
    std::memcpy(&first, results_->asserts(slot), sizeof first);
    asserts_->require_none(first, fmt::format("step {}", step.number + 1));
  }
  Result result;
  result.targets = step.positions;
  result.loss = numbers[StepNumbers::loss] / static_cast<double>(std::max<int64_t>(1, result.targets));
  result.grad_norm = std::sqrt(numbers[StepNumbers::norm_squared]);
  const int64_t index_terms = std::max<int64_t>(1, step.index_rows * config_.model.n_kv_groups);
  result.index_loss = numbers[StepNumbers::index_loss] / static_cast<double>(index_terms);
  result.index_grad_norm = std::sqrt(numbers[StepNumbers::index_norm_squared]);
  result.finite = std::isfinite(result.loss) && std::isfinite(result.grad_norm) && std::isfinite(result.index_loss) &&
                  std::isfinite(result.index_grad_norm);
  result.stop = numbers[StepNumbers::stop] != 0;
  if (step.measured) result.grads = ledger_.read(reinterpret_cast<const double*>(results_->norms(slot)));
  if (stats_ && !step.dense) result.stats = read_stats(results_->stats(slot));
  result.index_losses = read_sums(results_->stats(slot), stats_numbers(config_), index_numbers(config_));
  for (double& loss : result.index_losses) loss /= static_cast<double>(index_terms);
  const int64_t fp8_first = layer_numbers(config_) - fp8_numbers(config_);
  result.fp8_counts = read_sums(results_->stats(slot), fp8_first, fp8_numbers(config_));
  result.trace = trace_.take(slot.index);
  if (bucket_trace_) result.buckets = bucket_trace_->take();
  result.times = results_->times(slot);
  if (result.finite) return result;
  result.bad_rank = world_ > 1 ? static_cast<int64_t>(numbers[StepNumbers::bad_rank]) : 0;
  auto bad = static_cast<int64_t>(numbers[StepNumbers::bad_part]);
  if (bad >= 0) bad = param_of_range_[static_cast<size_t>(bad)];
  if (sharded()) bad = first_bad_of_all(*comm_, bad);
  result.bad_tensor =
      bad < 0 ? "the loss" : "the gradient of " + model_.params().specs()[static_cast<size_t>(bad)].name;
  return result;
}

double TrainStep::evaluate(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                           std::span<const int32_t> bounds, const SampledRows& sampled) {
  upload({tokens, targets, bounds}, /*step_positions=*/1, /*index_rows=*/0);
  if (asserts_) asserts_->clear(ctx_);
  Activations& act = form().act;
  model_.attend_densely(false);
  model_.count_fp8({});
  Model::AfterLayer sample;
  if (!sampled.tokens.empty()) {
    index_sample_->begin(ctx_, sampled.tokens);
    sample = [&](int64_t layer, LayerActivations&) { index_sample_->add(ctx_, layer, act, sampled.dense); };
  }
  model_.forward(ctx_, act, /*stats=*/nullptr, optimizer_.weights(), sample);
  model_.loss(ctx_, act);
  sum(ctx_, eval_loss_, act.row_loss);
  double loss = 0;
  read(ctx_, &loss, eval_loss_);
  if (asserts_) asserts_->require_none(ctx_, "an evaluation");
  return loss;
}

}  // namespace triad
