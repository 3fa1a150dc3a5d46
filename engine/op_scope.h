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
};

// Scopes nest, and the outermost counts: a product inside the classifier is the classifier's.
class OpScope {
 public:
  OpScope(Context& ctx, const char* op)
      : listeners_(ctx.in_op || ctx.listeners == nullptr || ctx.listeners->empty() ? nullptr : ctx.listeners),
        in_op_(ctx.in_op) {
    if (listeners_ == nullptr) return;
    in_op_ = true;
    for (OpListener* listener : *listeners_) listener->begin(op);
  }
  ~OpScope() {
    if (listeners_ == nullptr) return;
    for (auto listener = listeners_->rbegin(); listener != listeners_->rend(); ++listener) (*listener)->end();
    in_op_ = false;
  }
  OpScope(const OpScope&) = delete;

 private:
  std::vector<OpListener*>* listeners_;
  bool& in_op_;
};

}  // namespace triad
