// OpScope: marks all work queued during the scope, library calls included, as part of one op, so that listeners (a
// profiler, the memory log, NVTX) can attribute kernels and temporaries to it. Without listeners a scope costs one
// comparison. Listeners may be added or removed only between ops.
#pragma once
#include "engine/context.h"

namespace triad {

class OpListener {
 public:
  virtual ~OpListener() = default;
  virtual void begin(const char* op) = 0;
  virtual void end() = 0;
  // The same, with the stream on which the op queues its work. A listener that needs the stream overrides these
  // instead.
  virtual void begin_on(const char* op, const Stream&) { begin(op); }
  virtual void end_on(const Stream&) { end(); }
};

// Only the outermost nested scope counts: a matrix product inside the classifier is attributed to the classifier.
class OpScope {
 public:
  OpScope(Context& ctx, const char* op)
      : listeners_(ctx.in_op || ctx.listeners == nullptr || ctx.listeners->empty() ? nullptr : ctx.listeners),
        in_op_(ctx.in_op),
        stream_(ctx.stream) {
    if (listeners_ == nullptr) return;
    in_op_ = true;
    for (OpListener* listener : *listeners_) listener->begin_on(op, stream_);
  }
  ~OpScope() {
    if (listeners_ == nullptr) return;
    for (auto listener = listeners_->rbegin(); listener != listeners_->rend(); ++listener) (*listener)->end_on(stream_);
    in_op_ = false;
  }
  OpScope(const OpScope&) = delete;

 private:
  std::vector<OpListener*>* listeners_;
  bool& in_op_;
  const Stream& stream_;
};

}  // namespace triad
