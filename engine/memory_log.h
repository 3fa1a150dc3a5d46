// MemoryLog: the last kEvents allocations and releases in a device's scratch memory, each with op, layer and source
// line, and totals over all events. io/memory_snapshot.h writes it in PyTorch's memory tool formats. alloc() and
// release() may be called only by the one thread that queues work; read() may be called by any thread at any time.
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
  static constexpr size_t kEvents = size_t{1} << 14;        // event ring size
  static constexpr int64_t kSmallBytes = int64_t{1} << 20;  // largest allocation in the pool `small`, as in PyTorch
  enum class Kind : uint8_t { alloc, free };
  struct Event {
    const std::byte* address;
    int64_t bytes;          // tensor size without padding
    int64_t time_us;        // microseconds since 1970
    const char *name, *op;  // name: the tensor's; op: nullptr outside ops
    const char* file;       // source file that allocated
    int32_t line, layer;    // source line; model layer, -1 outside the layers
    Kind kind;
  };
  // Statistics of one quantity in a pool: present value, maximum so far, and the sums over all allocations and over all
  // releases.
  struct Total {
    int64_t current = 0, peak = 0, allocated = 0, freed = 0;
    void add(int64_t n);
    void remove(int64_t n);
  };
  // Allocation statistics for a size class.
  struct Pool {
    Total count, bytes, requested;  // allocations; bytes with padding; bytes without padding
  };

  explicit MemoryLog(const Routes& routes) : routes_(routes) { ring_.reserve(kEvents); }
  void begin(const char* op) override { op_ = op; }
  void end() override { op_ = nullptr; }

  void alloc(const std::byte* address, int64_t bytes, const char* name, const std::source_location& where);
  void release(const std::byte* from);  // releases all allocations at or above this address

  struct Contents {
    std::vector<Event> events;  // oldest first
    std::vector<Event> live;    // allocations not yet released, by address
    int64_t lost = 0;           // events that newer ones have overwritten in the ring
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
