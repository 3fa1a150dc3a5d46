// UnusedMemory: temporaries in a tensor's memory whose values are no longer needed, and in scratch if that is full.
#pragma once
#include <utility>

#include "engine/memory.h"

namespace triad {

class UnusedMemory {
 public:
  // unused: a contiguous tensor. scope: what does not fit is allocated there.
  UnusedMemory(const Tensor& unused, Scratch::Scope& scope)
      : at_(unused.data), left_(unused.bytes()), device_(unused.device), scope_(&scope) {}
  // The remaining memory, for an inner scope's temporaries; it is free again when that scope ends. Until then, this
  // object's alloc() would return the same memory.
  UnusedMemory in(Scratch::Scope& inner) const {
    UnusedMemory rest = *this;
    rest.scope_ = &inner;
    return rest;
  }
  Tensor alloc(DType dtype, const Shape& shape, const char* name) {
    const int64_t bytes = align_up(shape.numel() * size_of(dtype));
    if (bytes > left_) return scope_->alloc(dtype, shape, name);
    left_ -= bytes;
    return Tensor(std::exchange(at_, at_ + bytes), dtype, shape, device_);
  }

 private:
  std::byte* at_;
  int64_t left_;  // bytes
  Device device_;
  Scratch::Scope* scope_;
};

}  // namespace triad
