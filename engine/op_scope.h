// OpScope: the op that the work queued meanwhile belongs to. A profiler who listens (tools/kernel_trace.h) so knows
// whose a kernel is, a library's too; without one a scope costs a comparison.
#pragma once
#include "engine/context.h"

namespace triad {

class OpListener {
 public:
  virtual ~OpListener() = default;
  virtual void begin(const char* op) = 0;
  virtual void end() = 0;
  // The same with the stream that the op queues its work on, for who asks.
  virtual void begin_on(const char* op, const Stream&) { begin(op); }
  virtual void end_on(const Stream&) { end(); }
};

// Scopes nest, and the outermost counts: a product inside the classifier is the classifier's.
class OpScope {
 public:
  OpScope(Context& ctx, const char* op)
      : listener_(ctx.in_op ? nullptr : ctx.listener), in_op_(ctx.in_op), stream_(ctx.stream) {
    if (listener_ == nullptr) return;
    in_op_ = true;
    listener_->begin_on(op, stream_);
  }
  ~OpScope() {
    if (listener_ == nullptr) return;
    listener_->end_on(stream_);
    in_op_ = false;
  }
  OpScope(const OpScope&) = delete;

 private:
  OpListener* listener_;
  bool& in_op_;
  const Stream& stream_;
};

}  // namespace triad
