// GradReducer: sums gradients over the ranks while backward still runs. The flat gradient buffer is divided into
// buckets. In the last micro-step of a step, a bucket's collective starts on the comm stream as soon as backward has
// finished the bucket's last gradient, so that all but the last collectives overlap with backward.
#pragma once
#include <fmt/format.h>

#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/graph.h"
#include "model/grad_sink.h"
#include "model/params.h"
#include "train/config.h"
#include "train/dist/bucket_plan.h"
#include "train/dist/comm_queue.h"
#include "train/monitor/bucket_trace.h"

namespace triad {

class GradReducer final : public GradSink {
 public:
  // probe [1] f64: receives the sum of squares of this rank's own gradient of the first norm (RankNumbers::probe),
  // before the sum over ranks.
  GradReducer(Context&, Arena&, const Params&, Comm&, const Config&, Tensor probe);

  // Records times and checksums of each bucket's collective in *trace, which must outlive the reducer's steps.
  void trace(BucketTrace* trace) { trace_ = trace; }

  // Call before a backward whose gradients are to be summed. recorded: the backward is being captured as a graph, which
  // contains no collectives; call reduce_recorded() after each launch of the graph instead.
  void begin(bool recorded = false);
  void reduce_recorded();
  void ready(ConstTensor grad, const Stream& on) override;
  // Call after backward. Throws MissingGradients if it did not announce every gradient. ctx.stream waits for the sums
  // only in the next queue().run().
  void finish();

  const BucketPlan& plan() const { return plan_; }
  CommQueue& queue() { return queue_; }
  // All-gathers values [elements of the bucket], in which each rank has written its shard, on the comm stream after
  // earlier work on ctx.stream. queue().join() makes ctx.stream wait for it. what: names the values in reports.
  void gather(const GradBucket& bucket, Tensor values, const char* what) {
    queue_.all_gather(values, fmt::format("{} of bucket {}", what, plan_.index_of(bucket)));
  }
  // dist.zero 1: [stored elements / kSumPiece] f64, the sum of squares of each piece of kSumPiece summed gradients that
  // this rank owns; pieces of other ranks are not written.
  Tensor squares() const { return squares_; }
  // Staging buffer [elements of the largest bucket] f32: holds the other ranks' shards of a bucket where ranks exchange
  // them by peer copies; free for other use between steps.
  Tensor staging() const { return staging_; }
  std::string table() const;  // text of ddp_buckets.txt

 private:
  void full(int64_t bucket);
  void reduce(int64_t bucket);
  void sum(const Tensor& bucket, const std::string& what, CommCtas);
  bool by_copies() const { return comm_.shares() && !staging_.empty(); }
  bool sums_by_copies(int64_t elements) const { return by_copies() && elements % comm_.world() == 0; }

  Context& ctx_;
  const Params& params_;
  Comm& comm_;
  bool zero_;
  CommCtas ctas_;
  BucketPlan plan_;
  CommQueue queue_;
  int64_t probe_param_;
  Tensor probe_;
  Tensor sent_bf16_;  // [elements of the largest bucket] bf16: a bucket in the collectives, with dist.grad_dtype bf16
  Tensor squares_;    // [stored elements / kSumPiece] f64
  Tensor staging_;    // [elements of the largest bucket] f32; empty if neither shards nor peer copies need it
  BucketTrace* trace_ = nullptr;

  GradArrivals arrivals_;
  std::vector<size_t> missing_;         // by bucket: number of gradients that backward has not announced yet
  std::vector<const Stream*> streams_;  // streams on which gradients were announced
  bool recorded_ = false;
  std::vector<int64_t> order_;                   // buckets in the order in which they became full
  std::vector<std::vector<GraphEvent>> filled_;  // by bucket: an event on each of streams_ when it became full
};

}  // namespace triad
