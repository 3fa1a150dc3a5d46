// CommQueue: orders work between the compute stream and the comm stream by events, so the host never waits. While
// memory is planned, nothing is queued.
#pragma once
#include <string>

#include "engine/comm/comm.h"
#include "engine/context.h"

namespace triad {

class CommQueue {
 public:
  CommQueue(Context& ctx, Comm& comm)
      : ctx_(ctx),
        comm_(comm),
        comm_ctx_(ctx.on(comm.stream(), ctx.scratch)),
        event_(ctx.planning ? Device::cpu() : ctx.device) {}

  Context& ctx() { return comm_ctx_; }  // the compute context, but with the comm stream as its stream
  const Stream& stream() const { return comm_.stream(); }
  int64_t rank() const { return comm_.rank(); }
  int64_t world() const { return comm_.world(); }

  // Later work on the comm stream waits for earlier work on the compute stream.
  void wait_for_compute() { order(ctx_.stream, comm_.stream()); }
  // Later work on the compute stream waits for earlier work on the comm stream.
  void join() { order(comm_.stream(), ctx_.stream); }
  // Runs call(), which queues collectives. They run after earlier work on the compute stream and before later work on
  // it.
  template <class Call>
  void run(Call&& call) {
    wait_for_compute();
    if (!ctx_.planning) call();
    join();
  }
  // Queues an all-gather of `values`, in which each rank has written an equal share. It starts after earlier work on
  // the compute stream; join() makes the compute stream wait for it.
  void all_gather(Tensor values, const std::string& what) {
    wait_for_compute();
    if (!ctx_.planning) comm_.all_gather(values, what);
  }

 private:
  void order(const Stream& before, const Stream& after) {
    if (ctx_.planning) return;
    event_.record(before);
    event_.block(after);
  }

  Context& ctx_;
  Comm& comm_;
  Context comm_ctx_;
  Event event_;  // reused for every wait: each record is followed immediately by its wait
};

}  // namespace triad
