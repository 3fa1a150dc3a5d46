// MemoryLog: what a device's scratch memory was handed out for, by whom, and when it came back: the last kEvents of it
// in a ring, and totals of all. Recorded while work is queued, by the one thread that queues it; another may read
// meanwhile (a dump on request). An event costs about 60 ns of the host, and nothing of the device.
#pragma once
#include <array>
#include <mutex>
#include <source_location>
#include <vector>

#include "engine/op_scope.h"

namespace triad {

int64_t now_us();  // since 1970

class MemoryLog final : public OpListener {
 public:
  static constexpr size_t kEvents = size_t{1} << 14;        // some ten steps of twelve layers
  static constexpr int64_t kSmallBytes = int64_t{1} << 20;  // PyTorch's small pool: requests up to here
  enum class Kind : uint8_t { alloc, free };
  struct Event {
    const std::byte* address;
    int64_t bytes;  // asked for, without the padding behind
    int64_t time_us;
    const char *name, *op;  // op: nullptr outside of ops
    const char* file;
    int32_t line, layer;  // layer: -1 outside of the layers
    Kind kind;
  };
  // Of a pool: now, most ever, and all that was ever handed out and taken back.
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
  void release(const std::byte* from);  // all that is handed out from this address on

  struct Contents {
    std::vector<Event> events;  // oldest first
    std::vector<Event> live;    // handed out now, in the order of addresses
    int64_t lost = 0;           // events that the ring has no room for any more
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
