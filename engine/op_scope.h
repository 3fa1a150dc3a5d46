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
};

// Scopes nest, and the outermost counts: a product inside the classifier is the classifier's.
class OpScope {
 public:
  OpScope(Context& ctx, const char* op) : listener_(ctx.in_op ? nullptr : ctx.listener), in_op_(ctx.in_op) {
    if (listener_ == nullptr) return;
    in_op_ = true;
    listener_->begin(op);
  }
  ~OpScope() {
    if (listener_ == nullptr) return;
    listener_->end();
    in_op_ = false;
  }
  OpScope(const OpScope&) = delete;

 private:
  OpListener* listener_;
  bool& in_op_;
};

}  // namespace triad
