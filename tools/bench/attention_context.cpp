#include "tools/bench/attention_context.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "model/sequence/attention.h"
#include "model/sequence/exchange_meter.h"
#include "tools/bench/exchanges.h"
#include "tools/bench/ranks.h"

namespace triad {

namespace {

constexpr double kGB = 1e9;

// Tensors for a rank's tokens, and a layer's calls on them.
class SharedRun {
 public:
  // p: the whole sequences. rank: this rank within the group; while memory is planned, any rank.
  SharedRun(Runtime& runtime, Comm& group, const AttentionProblem& p, DType dtype, int64_t rank)
      : ctx_(runtime.ctx()),
        layout_(SequenceLayout::of(p.T, group.world(), rank, ctx_.device)),
        part_(part_of(p, layout_)),
        tensors_(allocate_attention(runtime.arena(), part_, dtype, layout_.tokens())),
        group_(ctx_, group, layout_),
        exec_(shared_sequences(group_)),
        lc_{.config = part_.config,
            .exec = *exec_,
            .rope = {},
            .B = part_.B,
            .T = part_.T,
            .layout = layout_,
            .layer = 0},
        in_(views_of(tensors_.qkv, tensors_.index)),
        din_(views_of(tensors_.dqkv, tensors_.dindex)) {
    lc_.documents.part = layout_.row_part();
    if (!part_.config.has_index()) return;
    lc_.teaches_index = true;
    index_ = {index_in(in_), tensors_.saved.nsa.index_lse, tensors_.index_dq, din_.index_k, tensors_.index_loss};
  }
  SharedRun(const SharedRun&) = delete;

  // Random inputs, different on each rank.
  void fill(double drift) {
    constexpr uint64_t kStreams = 2;  // random streams per rank
    const uint64_t stream = 2 + kStreams * static_cast<uint64_t>(layout_.rank);
    fill_attention(ctx_, tensors_, part_, random_qkv(part_, tensors_.qkv.dtype, drift, Normals(stream)), stream + 1);
  }
  SequenceGroup& group() { return group_; }
  void forward() {
    report_stage(ctx_, Stage::forward, lc_.layer);
    switch (part_.kind()) {
      case AttentionKind::nsa:
        return exec_->nsa_forward(ctx_, lc_, tensors_.out, tensors_.saved.nsa, in_, tensors_.weights);
      case AttentionKind::selected:
        return exec_->selected_forward(ctx_, lc_, selected_saved(), in_);
      case AttentionKind::dense:
        return exec_->dense_forward(ctx_, lc_, tensors_.saved.dense, in_, /*index=*/nullptr);
      case AttentionKind::window:
        return exec_->window_forward(ctx_, lc_, tensors_.saved.dense, in_);
    }
  }
  void backward() {
    report_stage(ctx_, Stage::backward, lc_.layer);
    const IndexBackward* const index = lc_.teaches_index ? &index_ : nullptr;
    const DenseGrad grad{tensors_.dq, din_.k[0], din_.v[0]};
    switch (part_.kind()) {
      case AttentionKind::nsa:
        return exec_->nsa_backward(ctx_, lc_, {tensors_.dq, tensors_.dq_group, din_.k, din_.v, {}, index},
                                   tensors_.weight_grads, tensors_.dout, in_, tensors_.saved.nsa, tensors_.weights);
      case AttentionKind::selected:
        return exec_->selected_backward(ctx_, lc_, grad, tensors_.dout, in_, selected_saved(), index);
      case AttentionKind::dense:
        return exec_->dense_backward(ctx_, lc_, grad, tensors_.dout, in_, tensors_.saved.dense, /*index=*/nullptr);
      case AttentionKind::window:
        return exec_->window_backward(ctx_, lc_, grad, tensors_.dout, in_, tensors_.saved.dense);
    }
  }

 private:
  QkvViews views_of(const Tensor& qkv, const Tensor& index) const {
    const QkvViews views = split_qkv(qkv, part_.config, part_.kind(), part_.B, part_.T);
    return index.empty() ? views : with_index(views, index, part_.config);
  }
  SelectedSaved selected_saved() const {
    const AttentionSaved& s = tensors_.saved;
    return {s.nsa.block_index, s.dense.o, s.dense.lse, s.nsa.index_lse};
  }
  static AttentionProblem part_of(const AttentionProblem& p, const SequenceLayout& layout) {
    AttentionProblem part = p;
    part.T = layout.local_tokens();
    return part;
  }

  Context& ctx_;
  const SequenceLayout layout_;
  const AttentionProblem part_;
  const AttentionTensors tensors_;
  SequenceGroup group_;
  const std::unique_ptr<const AttentionExec> exec_;
  LayerContext lc_;
  const QkvViews in_, din_;
  IndexBackward index_;  // with a taught index
};

// Memory on the rank that needs most (plan_memory()).
AttentionMemory plan_shared(const AttentionProblem& p, int ranks, Device device, DType dtype) {
  AttentionMemory most;
  const std::unique_ptr<Comm> group = make_planned_comm(ranks);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    Runtime runtime({.device = device, .planning = true});
    SharedRun run(runtime, *group, p, dtype, rank);
    run.forward();
    most.scratch_forward = std::max(most.scratch_forward, runtime.scratch().peak_bytes());
    run.backward();
    most.scratch_backward = std::max(most.scratch_backward, runtime.scratch().peak_bytes());
    most.arena = std::max(most.arena, runtime.arena().used_bytes());
  }
  most.arena += most.scratch();
  return most;
}

std::string missing(int64_t needed, int64_t free) {
  return fmt::format("needs {:.1f} GB, {:.1f} GB are free", static_cast<double>(needed) / kGB,
                     static_cast<double>(free) / kGB);
}

}  // namespace

SharedAttentionBench::SharedAttentionBench(Comm& comm, Device device, DType dtype)
    : comm_(comm),
      device_(device),
      dtype_(dtype),
      together_(device, [this](double us) { return longest(us); }),
      alone_(device),
      links_(measure_links(device, comm)) {}

double SharedAttentionBench::longest(double us) const {
  const std::vector<double> all = comm_.all_gather_host(us, "the time of a run");
  return *std::max_element(all.begin(), all.end());
}

SharedAttentionBench::Times SharedAttentionBench::time_shared(SharedAttention& to, const AttentionProblem& p,
                                                              double drift, const AttentionMemory& memory) {
  Runtime runtime({.device = device_, .arena_bytes = memory.arena, .scratch_bytes = memory.scratch()});
  Context& ctx = runtime.ctx();
  SharedRun run(runtime, comm_, p, dtype_, comm_.rank());
  run.fill(drift);
  const auto forward = [&] { run.forward(); };
  const auto backward = [&] { run.backward(); };
  forward();
  backward();
  Times times = {together_(ctx, forward), together_(ctx, backward)};
  for (Timing& timing : times) timing.us = longest(timing.us);

  constexpr int64_t kMeasured = 4;  // passes for the exchanges
  ExchangeMeter meter(ctx, run.group());
  forward();
  backward();
  meter.time_waits(kMeasured);
  for (int64_t i = 0; i < kMeasured; ++i) forward(), backward();
  ctx.stream.synchronize();
  comm_.stream().synchronize();
  to.rows = {{{"pass", "forward"}}, {{"pass", "backward"}}};
  to.rows[1]["exchanges"] = gather_exchanges(comm_, meter.totals(), kMeasured);
  return times;
}

SharedAttentionBench::Times SharedAttentionBench::time_whole(const AttentionProblem& p, double drift,
                                                             const AttentionMemory& memory) {
  AttentionRun run(p, memory, random_qkv(p, dtype_, drift, Normals(2)), device_, dtype_);
  Times times;
  for (const AttentionPart& part : run.parts().all())  // forward, then backward
    if (part.whole()) times[part.forward ? 0 : 1] = alone_(run.ctx(), [&] { part.work(run.ctx()); });
  return times;
}

SharedAttention SharedAttentionBench::operator()(const AttentionProblem& p, double drift) {
  SharedAttention result;
  const AttentionMemory shared = plan_shared(p, comm_.world(), device_, dtype_);
  result.shared_gb = static_cast<double>(shared.arena) / kGB;
  const std::vector<int64_t> free =
      comm_.all_gather_host(backend::info(device_).free_bytes, "the free memory of each rank");
  if (const int64_t least = *std::min_element(free.begin(), free.end()); shared.arena > least) {
    result.skipped = missing(shared.arena, least);
    return result;
  }
  const Times times = time_shared(result, p, drift, shared);
  std::optional<Times> whole;
  if (comm_.first()) {
    const AttentionMemory memory = plan_attention(p, device_, dtype_);
    const int64_t room = backend::info(device_).free_bytes;
    if (memory.arena > room)
      result.no_ideal = missing(memory.arena, room);
    else
      whole = time_whole(p, drift, memory);
  }
  comm_.barrier("the whole sequences of rank 0");
  for (size_t i = 0; i < times.size(); ++i) {
    Json& row = result.rows[i];
    row["us"] = times[i].us;
    row["runs"] = times[i].runs;
    row["ranks"] = comm_.world();
    if (whole) row["ideal_us"] = (*whole)[i].us / comm_.world();
  }
  return result;
}

void SharedAttentionBench::print(const std::string& name, const SharedAttention& s) const {
  fmt::print("\n{}\n", name);
  if (!s.skipped.empty()) return fmt::print("skipped: {}\n", s.skipped);
  const bool ideal = s.no_ideal.empty();
  fmt::print("{:<12} {:>11} {:>22} {:>9}\n", "pass", "ms", fmt::format("one card's ms / {}", comm_.world()),
             "of ideal");
  double us = 0, ideal_us = 0;
  const auto line = [&](const std::string& pass, double mine, double best) {
    fmt::print("{:<12} {:>11.3f} {:>22} {:>9}\n", pass, mine * 1e-3, ideal ? fmt::format("{:.3f}", best * 1e-3) : "-",
               ideal ? fmt::format("{:.1f}%", 100 * best / mine) : "-");
  };
  for (const Json& row : s.rows) {
    const double mine = row["us"], best = row.value("ideal_us", 0.0);
    us += mine, ideal_us += best;
    line(row["pass"], mine, best);
  }
  line("both", us, ideal_us);
  if (!ideal) fmt::print("one card, whole sequences: {}\n", s.no_ideal);
  fmt::print("memory of each rank: {:.3f} GB\n", s.shared_gb);
  print_exchanges(s.rows[1]["exchanges"], links_, /*micro_steps=*/1);
}

}  // namespace triad
