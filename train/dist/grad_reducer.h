// GradReducer: sums gradients over the ranks while backward still runs. The flat gradient buffer is divided into
// buckets. A bucket's collective starts on the comm stream as soon as backward has finished the bucket's last gradient,
// so only the last collectives don't overlap with backward. With replicas of several ranks a bucket then passes between
// them in a stream of their own, while the next bucket is summed within them. All ranks queue collectives in the same
// order, so those of both streams can wait for each other's SMs without a circle.
//
// Without a layer ring, backward adds the micro-steps' gradients up in the whole flat buffer, where they are summed
// over the ranks in the last micro-step. With a layer ring (has_grad_windows) every micro-step's gradients are summed
// over the ranks and then added to sums(), which has only this rank's shards (dist.zero 2 and 3), or another dtype
// (train.grads_dtype). A segment's memory is free for the next segment when this has happened.
#pragma once
#include <fmt/format.h>

#include <optional>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/graph.h"
#include "model/grad_sink.h"
#include "model/params.h"
#include "train/config/config.h"
#include "train/dist/bucket_plan.h"
#include "train/dist/comm_queue.h"
#include "train/dist/rank_groups.h"
#include "train/monitor/bucket_trace.h"

namespace triad {

class GradReducer final : public GradSink {
 public:
  // probe [1] f64: receives the sum of squares of this rank's first-norm gradient before the sum over ranks
  // (RankNumbers::probe), which shows whether this rank's backward was finite.
  GradReducer(Context&, Arena&, const Params&, const RankGroups&, const Config&, Tensor probe);

  // Records each bucket's collective (times and checksums) in *trace, which must outlive the reducer's last step.
  void trace(BucketTrace* trace) { trace_ = trace; }

  // With a layer ring: whether a micro-step is the first in its step, which overwrites sums(), or the last, after which
  // they are complete; and its number from the run's beginning.
  struct MicroStep {
    bool first = true, last = true;
    int64_t number = 0;
  };
  // Call before a backward whose gradients are to be summed. recorded: this backward is being captured as a CUDA graph,
  // which contains no collectives; call reduce_recorded() after each graph launch instead.
  void begin(bool recorded, const MicroStep&);
  void begin() { begin(/*recorded=*/false, {}); }
  void reduce_recorded();
  void open(int64_t segment, const Stream& on) override;
  void ready(ConstTensor grad, const Stream& on) override;
  // Call after a backward that passed every gradient to ready() (GradLedger::require_all checks that). ctx.stream waits
  // for the sums only in the next queue().run().
  void finish();

  const BucketPlan& plan() const { return plan_; }
  CommQueue& queue() { return queue_; }
  // Queues an all-gather of `values` [bucket elements], in which each rank in this replica has written its shard, on
  // the comm stream after earlier work on ctx.stream. queue().join() makes ctx.stream wait for it. what: the values'
  // name in reports.
  void gather(const GradBucket& bucket, Tensor values, const char* what) {
    queue_.all_gather(values, fmt::format("{} of bucket {}", what, plan_.index_of(bucket)));
  }
  // A step's gradients, summed over its micro-steps and all ranks, in sums() [parts().size()]; with dist.zero 1 in the
  // whole flat buffer, where only this rank's shards have sums.
  Tensor sums() const { return sums_; }
  const Parts& parts() const { return parts_; }
  // With shards: [stored elements / kSumPiece] f64, for each piece (kSumPiece summed gradients) the sum of squares.
  // Only the pieces that this rank owns are written.
  Tensor squares() const { return squares_; }
  // Staging buffer [largest bucket's elements] f32. It holds other ranks' shards of a bucket where one of Triad's own
  // kernels adds them; between steps, others may use it.
  Tensor staging() const { return staging_; }
  // Why a sum does not use copies between GPUs, or none over the replicas does; empty if all do, or on the CPU.
  std::string why_no_copies() const;
  std::string table() const;  // ddp_buckets.txt's text

 private:
  void full(int64_t bucket);
  void reduce(int64_t bucket);
  void begin_between();
  void sum_over_replicas(int64_t bucket);
  void complete(int64_t bucket);
  void complete_under_way();
  void sum(const Tensor& grads, const Tensor& sent, const std::string& what, CommCtas);
  void sum_own_part(Comm&, Context&, const Tensor& grads, const Tensor& sent, const Tensor& staging,
                    const std::string& what);
  bool sums_with_kernel() const { return by_copies() || !sent_bf16_.empty(); }
  Tensor keep(int64_t bucket, const ElementRange& held, const Tensor& micro_step_grads);
  int64_t segment_of(const GradBucket&) const;
  bool by_copies() const { return comm_.shares() && !staging_.empty(); }

  Context& ctx_;
  const Params& params_;
  Comm& comm_;      // ranks in this rank's replica
  Comm* replicas_;  // RankGroups::replicas
  bool sharded_, windows_;
  CommCtas ctas_;
  BucketPlan plan_;
  Parts parts_;
  Tensor sums_;
  CommQueue queue_;
  int64_t probe_param_;
  Tensor probe_;
  // [largest bucket's elements] bf16: the bucket being summed, with dist.grad_dtype bf16
  Tensor sent_bf16_;
  Tensor squares_;  // [stored elements / kSumPiece] f64: sums of squares, see squares()
  Tensor staging_;  // staging(); empty where NCCL or the host sums whole buckets
  // With replicas_, [largest bucket's elements / ranks in a replica] each: other replicas' parts of a bucket's part,
  // and the part in bf16 with dist.replicas_grad_dtype bf16, else empty. `between_` has the replicas' stream.
  Tensor between_staging_, between_bf16_;
  std::optional<Context> between_;
  Event between_begun_;               // marks the comm stream where a bucket may pass between the replicas
  Event between_done_;                // marks the replicas' stream after the bucket under way
  std::optional<int64_t> under_way_;  // bucket that passes between the replicas
  BucketTrace* trace_ = nullptr;

  GradFinder finder_;
  std::vector<size_t> missing_;         // gradients that backward has not reported yet, by bucket
  std::vector<const Stream*> streams_;  // the streams on which backward computed the reported gradients
  bool recorded_ = false;
  MicroStep micro_step_;
  uint64_t seed_;
  // With a layer ring, by segment: how many of its buckets aren't summed yet, and when the last one's sum ends on the
  // comm stream. pending_: the segment's memory must not be overwritten before that.
  std::vector<int64_t> buckets_left_;
  std::vector<Event> summed_;
  std::vector<bool> pending_;
  std::vector<int64_t> order_;  // bucket indices, in the order in which buckets became full
  // by bucket: events on each of streams_, recorded when it became full
  std::vector<std::vector<GraphEvent>> filled_;
};

}  // namespace triad
