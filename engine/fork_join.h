// ForkJoin: runs work on a side stream, concurrently with a context's own stream, where neither depends on the other.
// It fills the SMs that the last, partial wave of CTAs in another kernel leaves free, and hides small kernels under
// large ones. Kernels that fill every SM do not overlap otherwise, so the gain is limited to such tails and to latency.
//
//   ForkJoin window(ctx, 0, [&](Context& side) { nsa_attend_window_forward(side, ...); });
//   ... queued on ctx: runs at the same time ...
//   window.join();
//
// The side work starts after all work queued on ctx before the constructor; work queued on ctx after join() waits for
// it. In between, neither may write what the other uses.
//
// Scratch: ctx reuses released scratch immediately, which is safe only for work on one stream. Therefore the side
// stream has its own scratch, placed at the current top of ctx's, and its peak stays reserved until the ForkJoin is
// destroyed. To know this peak, the constructor queues the side work before anything else is queued on ctx. Matrix
// products share one workspace, so they must not run on a side stream (kernels/ops/matmul.cu checks this).
//
// Without side streams (on the CPU) the constructor runs the work on ctx itself; results must not depend on it.
#pragma once
#include <utility>

#include "engine/check.h"
#include "engine/context.h"

namespace triad {

class ForkJoin {
 public:
  // Queues work(context) on side stream `number`, 0 to 2. ForkJoins open at the same time must have different numbers;
  // stream 2 has priority over 0 and 1. With concurrent = false the work runs on ctx itself, as on the CPU.
  template <class Work>
  ForkJoin(Context& ctx, int number, Work&& work, bool concurrent = true)
      : ForkJoin(ctx, number, concurrent) {  // delegates, so that the destructor joins if work() throws
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
  // Joins during unwinding too; this join's errors are dropped in favour of the exception already in flight.
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
  ForkJoin(Context& ctx, int number, bool concurrent) : ctx_(ctx), taken_(ctx.scratch) {
    if (ctx.sides == nullptr || !concurrent) return;
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
