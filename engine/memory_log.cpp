#include "engine/memory_log.h"

#include <algorithm>
#include <chrono>

namespace triad {

int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void MemoryLog::Total::add(int64_t n) {
  current += n;
  allocated += n;
  peak = std::max(peak, current);
}
void MemoryLog::Total::remove(int64_t n) {
  current -= n;
  freed += n;
}

void MemoryLog::record(const Event& event) {
  const size_t at = static_cast<size_t>(recorded_++) % kEvents;
  if (at == ring_.size())
    ring_.push_back(event);
  else
    ring_[at] = event;
}

void MemoryLog::count(const Event& event) {
  const auto change = [&](Pool& pool) {
    const auto by = [&](Total& total, int64_t n) { event.kind == Kind::alloc ? total.add(n) : total.remove(n); };
    by(pool.count, 1);
    by(pool.bytes, align_up(event.bytes));
    by(pool.requested, event.bytes);
  };
  change(all_);
  change(event.bytes <= kSmallBytes ? small_ : large_);
}

void MemoryLog::alloc(const std::byte* address, int64_t bytes, const char* name, const std::source_location& where) {
  const Event event{address,
                    bytes,
                    now_us(),
                    name,
                    op_,
                    where.file_name(),
                    static_cast<int32_t>(where.line()),
                    static_cast<int32_t>(routes_.layer()),
                    Kind::alloc};
  const std::lock_guard<std::mutex> lock(mutex_);
  live_.push_back(event);
  record(event);
  count(event);
}

void MemoryLog::release(const std::byte* from) {
  if (live_.empty() || live_.back().address < from) return;  // needs no lock: no other thread changes live_
  const int64_t now = now_us();
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!live_.empty() && live_.back().address >= from) {
    Event event = live_.back();
    live_.pop_back();
    event.kind = Kind::free;
    event.time_us = now;
    record(event);
    count(event);
  }
}

MemoryLog::Contents MemoryLog::read() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Contents c;
  const size_t oldest = ring_.size() < kEvents ? 0 : static_cast<size_t>(recorded_) % kEvents;
  c.events.insert(c.events.end(), ring_.begin() + static_cast<std::ptrdiff_t>(oldest), ring_.end());
  c.events.insert(c.events.end(), ring_.begin(), ring_.begin() + static_cast<std::ptrdiff_t>(oldest));
  c.live = live_;
  c.lost = recorded_ - static_cast<int64_t>(ring_.size());
  c.all = all_, c.small = small_, c.large = large_;
  return c;
}

}  // namespace triad
