// OpScope: the op that the work queued meanwhile belongs to. Whoever listens (a profiler, the memory log, NVTX) so
// knows whose a kernel or a temporary is, a library's too; with nobody there a scope costs a comparison. One who joins
// or leaves does so between ops.
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
