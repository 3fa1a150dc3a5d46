// MemoryLog: the last kEvents allocations and releases of a device's scratch memory in a ring, with op, layer and
// source line, and totals over all events. The one thread that queues work records; another thread may read()
// concurrently.
#pragma once
#include <array>
#include <mutex>
#include <source_location>
#include <vector>

#include "engine/op_scope.h"

namespace triad {

int64_t now_us();  // microseconds since 1970

class MemoryLog final : public OpListener {
 public:
  static constexpr size_t kEvents = size_t{1} << 14;        // about ten steps of a model with twelve layers
  static constexpr int64_t kSmallBytes = int64_t{1} << 20;  // the largest small request, as in PyTorch's allocator
  enum class Kind : uint8_t { alloc, free };
  struct Event {
    const std::byte* address;
    int64_t bytes;  // requested, without the padding
    int64_t time_us;
    const char *name, *op;  // op: nullptr outside of ops
    const char* file;
    int32_t line, layer;  // layer: -1 outside of the layers
    Kind kind;
  };
  // Of a pool: the current value, its maximum, and the sums of all allocations and all releases.
  struct Total {
    int64_t current = 0, peak = 0, allocated = 0, freed = 0;
    void add(int64_t n);
    void remove(int64_t n);
  };
  struct Pool {
    Total count, bytes, requested;  // bytes: with the padding
  };

  explicit MemoryLog(const Routes& routes) : routes_(routes) { ring_.reserve(kEvents); }
  void begin(const char* op) override { op_ = op; }
  void end() override { op_ = nullptr; }

  void alloc(const std::byte* address, int64_t bytes, const char* name, const std::source_location& where);
  void release(const std::byte* from);  // releases all allocations at or above this address

  struct Contents {
    std::vector<Event> events;  // oldest first
    std::vector<Event> live;    // allocated now, by address
    int64_t lost = 0;           // events that the ring has overwritten
    Pool all, small, large;
  };
  Contents read() const;

 private:
  void record(const Event&);
  void count(const Event&);

  const Routes& routes_;
  const char* op_ = nullptr;
  mutable std::mutex mutex_;
  std::vector<Event> ring_, live_;
  int64_t recorded_ = 0;
  Pool all_, small_, large_;
};

}  // namespace triad
