// GradReducer: sums gradients over the ranks while backward still runs. The flat gradient buffer is divided into
// buckets. In the last micro-step of a step, a bucket's collective starts on the comm stream as soon as backward has
// finished the bucket's last gradient, so that all but the last collectives overlap with backward.
#pragma once
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/graph.h"
#include "model/grad_sink.h"
#include "model/params.h"
#include "train/config.h"
#include "train/flat_buffer.h"
#include "train/monitor/bucket_trace.h"

namespace triad {

struct GradBucket {
  ElementRange elements;
  std::vector<int64_t> params;  // indices of the parameters with elements in the bucket
  bool late = false;            // filled at the end of backward: its collective overlaps with nothing
};

// Divides the parameters' flat buffer into buckets of at most `elements` elements whose boundaries are multiples of
// unit, in the order in which backward is expected to fill them: matrices from the output head and the last layer to
// the first layer, then the small parameters, then the embedding, whose gradient backward finishes last. A gradient may
// span buckets. Late buckets are larger, because nothing overlaps with them and few large collectives are faster than
// many small ones.
std::vector<GradBucket> plan_buckets(const Params&, int64_t elements, int64_t unit);
// Elements of which bucket boundaries and the flat buffers' size are multiples (Params::Options::shard_elements).
int64_t bucket_unit(const DistConfig&, int64_t world);
// CTAs for NCCL's collectives during backward: few if the collectives are expected to finish within backward
// even so, which leaves more SMs to backward.
CommCtas comm_ctas_during_backward(const Config&, int64_t world);

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
  // only in the next run_on_comm_stream().
  void finish();

  const std::vector<GradBucket>& buckets() const { return buckets_; }
  // dist.zero 1: this rank's shard of the bucket. Only this rank has its summed gradients and updates its parameters.
  ElementRange owned(const GradBucket&) const;
  // dist.zero 1: [stored elements / kSumPiece] f64, the sum of squares of each piece of kSumPiece summed gradients that
  // this rank owns; pieces of other ranks are not written.
  Tensor squares() const { return squares_; }
  int64_t index_of(const GradBucket& bucket) const { return &bucket - buckets_.data(); }
  // All-gathers values [elements of the bucket], in which each rank has written its shard, on the comm stream, which is
  // returned. finish_gather: ctx.stream waits for the comm stream.
  const Stream& gather(const GradBucket&, Tensor values, const char* what);
  void finish_gather();
  // Runs call(), which queues other collectives, ordered after earlier and before later work on ctx.stream.
  template <class Call>
  void run_on_comm_stream(Call&& call) {
    comm_waits_for(ctx_.stream);
    if (!ctx_.planning) call();
    wait_for_comm();
  }

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
  // Later work on the comm stream waits for earlier work on `stream`; and later work on ctx.stream for the comm stream.
  void comm_waits_for(const Stream& stream);
  void wait_for_comm();

  Context& ctx_;
  Context comm_ctx_;  // ctx_ with the comm stream
  const Params& params_;
  Comm& comm_;
  bool zero_;
  CommCtas ctas_;
  std::vector<GradBucket> buckets_;
  std::vector<std::vector<int64_t>> buckets_of_;  // by parameter: indices of its buckets
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
  Event event_;                                  // reused: recorded and waited for at once
};

}  // namespace triad
