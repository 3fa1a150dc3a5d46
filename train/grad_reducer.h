// GradReducer: sums gradients over the ranks while backward still runs. The whole gradient buffer is cut into buckets;
// a bucket's collective starts on the comm stream as soon as backward has finished its last gradient, on the last
// micro-step alone. So the sums of all but the last buckets hide behind the rest of backward.
#pragma once
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/graph.h"
#include "model/grad_sink.h"
#include "model/params.h"
#include "train/config.h"
#include "train/monitor/bucket_trace.h"

namespace triad {

// Elements [begin, end) of a whole buffer.
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

struct GradBucket {
  ElementRange elements;
  std::vector<int64_t> params;  // those that have elements in it
  bool late = false;            // backward ends with it: nothing is left for its sum to hide behind
};

// Buckets of at most `elements`, all boundaries multiples of unit, in the order in which backward is expected to fill
// them: the products from the last layer to the first, with the head's before all; then the small ones; the
// embedding's, which backward finishes last and all at once, in the end. A large gradient is cut like the rest; the
// late ones less finely, since few large sums are faster than many small ones.
std::vector<GradBucket> plan_buckets(const Params&, int64_t elements, int64_t unit);
// Of what the buckets' boundaries, and so the whole buffers, have to be multiples (Params::Options::shard_elements).
int64_t bucket_unit(const DistConfig&, int64_t world);
// Of the sums beside backward: narrow, if it is long enough for them to end with it all the same.
CommCtas comm_ctas_during_backward(const Config&, int64_t world);

class GradReducer final : public GradSink {
 public:
  // The probe: what RankNumbers::probe tells of; written when its gradient comes, before it is summed.
  GradReducer(Context&, Arena&, const Params&, Comm&, const Config&, Tensor probe);

  // Who is told of each bucket's collective; must outlive the steps.
  void trace(BucketTrace* trace) { trace_ = trace; }

  // A backward that is to be summed begins. One that is recorded as a graph starts no collectives: reduce_recorded()
  // does, after each launch of it.
  void begin(bool recorded = false);
  void reduce_recorded();
  void ready(ConstTensor grad, const Stream& on) override;
  // After it. Throws, with their names, if gradients never came. ctx.stream waits for the sums in the next
  // run_on_comm_stream().
  void finish();

  const std::vector<GradBucket>& buckets() const { return buckets_; }
  // Zero 1: this rank's part of each bucket, whose sums it alone has and whose parameters it alone updates.
  ElementRange owned(const GradBucket&) const;
  // Zero 1, behind the sums: of each kSumPiece elements that it owns their sum of squares; the others are as they were.
  Tensor squares() const { return squares_; }
  int64_t index_of(const GradBucket& bucket) const { return &bucket - buckets_.data(); }
  // values [elements of the bucket], of which each rank has set what it owns: everyone gets all, on the comm stream,
  // which is returned. finish_gather: ctx.stream waits for it.
  const Stream& gather(const GradBucket&, Tensor values, const char* what);
  void finish_gather();
  // Another collective, between what is on ctx.stream before and what comes after.
  template <class Call>
  void run_on_comm_stream(Call&& call) {
    comm_waits_for(ctx_.stream);
    if (!ctx_.planning) call();
    wait_for_comm();
  }

  // Where the ranks sum by copies: for the others' shares of a bucket; else and in between, for whoever needs it. f32.
  Tensor room() const { return room_; }
  std::string table() const;  // ddp_buckets.txt

 private:
  void arrived(int64_t param, const Stream& on);
  void full(int64_t bucket);
  void reduce(int64_t bucket);
  void sum(const Tensor& bucket, const std::string& what, CommCtas);
  bool by_copies() const { return comm_.shares() && !room_.empty(); }
  bool sums_by_copies(int64_t elements) const { return by_copies() && elements % comm_.world() == 0; }
  // Whatever the comm stream does next comes after what is on `stream` now, and the other way round.
  void comm_waits_for(const Stream& stream);
  void wait_for_comm();

  Context& ctx_;
  Context comm_ctx_;  // the same, on the comm stream
  const Params& params_;
  Comm& comm_;
  bool zero_;
  CommCtas ctas_;
  std::vector<GradBucket> buckets_;
  std::vector<std::vector<int64_t>> buckets_of_;  // of each parameter
  std::vector<int64_t> by_offset_;                // parameters as they lie in the buffer
  int64_t probe_param_;
  Tensor probe_;
  Tensor half_;     // bf16: a bucket as it travels
  Tensor squares_;  // [stored elements / kSumPiece] f64
  Tensor room_;     // [elements of the largest bucket]; absent without shards where ranks cannot copy
  BucketTrace* trace_ = nullptr;

  std::vector<bool> arrived_;
  std::vector<size_t> missing_;         // of each bucket: gradients yet to come
  std::vector<const Stream*> streams_;  // that gradients have come on
  bool recorded_ = false;
  std::vector<int64_t> order_;                   // in which buckets became full
  std::vector<std::vector<GraphEvent>> filled_;  // of each bucket, where each of the streams was then
  Event event_;                                  // recorded and waited for at once, again and again
};

}  // namespace triad
