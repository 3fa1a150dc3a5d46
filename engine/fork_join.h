// ForkJoin: work on a stream of its own, beside what a context queues meanwhile, where neither needs the other. So the
// last, half empty wave of one kernel's CTAs leaves room that another kernel takes, and small kernels hide behind
// large ones. Kernels that fill every SM overlap nowhere else: what there is to win is tails and latency.
//
//   ForkJoin window(ctx, 0, [&](Context& side) { nsa_attend_window_forward(side, ...); });
//   ... queued on ctx: runs at the same time ...
//   window.join();
//
// The work begins behind all that ctx had queued so far; what ctx queues after join() waits for it. In between nobody
// may write what the other one reads or writes.
//
// Scratch: memory that ops on ctx hand back is handed out again at once, which is safe only in the order of one stream.
// So the side has a scratch of its own, in stack order like any: it lies where ctx's begins to be free, and what it
// needed at most stays taken as long as the ForkJoin lives. This is why the side's work is queued first, in the
// constructor. Matrix products share one workspace: none of them on a side (kernels/ops/matmul.cu checks it).
//
// Where a context has no side streams (the CPU) the work is done in its place, by ctx itself: results must not depend
// on it.
#pragma once
#include <utility>

#include "engine/check.h"
#include "engine/context.h"

namespace triad {

class ForkJoin {
 public:
  // Side streams are numbered, 0 to 2; two open Besides take two of them, and of kernels that wait for room 2 comes
  // before the others. apart = false: in its place, as on the CPU.
  template <class Work>
  ForkJoin(Context& ctx, int number, Work&& work, bool apart = true)
      : ForkJoin(ctx, number, apart) {  // so that an exception of work() finds a join
    if (side_ == nullptr) {
      work(ctx);
      return;
    }
    Scratch scratch(ctx.scratch, Scratch::Rest{});
    Context side = ctx.on(side_->stream, scratch);
    work(side);
    taken_.alloc(DType::u8, {scratch.peak_bytes()});
  }
  ForkJoin(const ForkJoin&) = delete;
  // On the way of an exception, which is the one to be told.
  ~ForkJoin() {
    try {
      join();
    } catch (...) {}
  }
  void join() {
    if (side_ == nullptr) return;
    SideStream& side = *std::exchange(side_, nullptr);
    side.busy = false;
    side.end.record(side.stream);
    side.end.block(ctx_.stream);
  }

 private:
  ForkJoin(Context& ctx, int number, bool apart) : ctx_(ctx), taken_(ctx.scratch) {
    if (ctx.sides == nullptr || !apart) return;
    SideStream& side = ctx.sides->at(static_cast<size_t>(number));
    TRIAD_CHECK(!std::exchange(side.busy, true), "side stream {} is taken", number);
    side_ = &side;
    side.begin.record(ctx.stream);
    side.begin.block(side.stream);
  }
  Context& ctx_;
  Scratch::Scope taken_;
  SideStream* side_ = nullptr;
};

}  // namespace triad
