#include "engine/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "engine/backend.h"
#include "engine/check.h"
#include "engine/memory_log.h"
#include "engine/units.h"

namespace triad {

namespace {
// Planned tensors' address: aligned, not null and unmapped, so that any access crashes.
std::byte* planned_base() { return reinterpret_cast<std::byte*>(uintptr_t{4096}); }

// A tensor's bytes. A plan may request any size, so overflow is an error here.
int64_t bytes_of(std::string_view name, DType dtype, const Shape& shape) {
  int64_t bytes = 0;
  TRIAD_CHECK(!__builtin_mul_overflow(shape.numel(), size_of(dtype), &bytes) && bytes <= int64_t{1} << 62,
              "tensor {} {}{} has more than 2^62 bytes", name, name_of(dtype), shape.str());
  return bytes;
}
}  // namespace

const char* name_of(MemTag tag) {
  constexpr const char* kNames[kMemTags] = {"params",      "master",    "grads", "optimizer",
                                            "activations", "workspace", "comm",  "io"};
  return kNames[static_cast<int>(tag)];
}

Arena::Arena(Device device, int64_t capacity_bytes, bool planning)
    : device_(device), capacity_(capacity_bytes), planning_(planning) {
  base_ = planning ? planned_base() : backend::allocate(device, capacity_bytes);
}
Arena::Arena(Device device, int64_t capacity_bytes) : Arena(device, capacity_bytes, false) {}
Arena Arena::planned(Device device) { return Arena(device, INT64_MAX, true); }

Arena::Arena(Arena&& other) noexcept
    : device_(other.device_),
      capacity_(other.capacity_),
      used_(other.used_),
      planning_(other.planning_),
      sealed_(other.sealed_),
      base_(std::exchange(other.base_, nullptr)),
      allocations_(std::move(other.allocations_)) {}

Arena::~Arena() {
  if (base_ != nullptr && !planning_) backend::deallocate(device_, base_);
}

Tensor Arena::alloc(MemTag tag, std::string_view name, DType dtype, const Shape& shape, const Where& where) {
  const int64_t wanted = bytes_of(name, dtype, shape), bytes = align_up(wanted);
  TRIAD_CHECK(!sealed_, "tensor {} {}{} was asked for after the arena of {} was sealed", name, name_of(dtype),
              shape.str(), device_.str());
  if (bytes > capacity_ - used_)
    throw OutOfMemory(fmt::format("out of memory on {}: {} {}{} needs {:.1f} MiB, {:.1f} of {:.1f} MiB are left\n{}",
                                  device_.str(), name, name_of(dtype), shape.str(), bytes / kMiB,
                                  (capacity_ - used_) / kMiB, capacity_ / kMiB, report()),
                      bytes, capacity_ - used_);
  Tensor t(base_ + used_, dtype, shape, device_);
  allocations_.push_back({tag, std::string(name), used_, wanted, dtype, shape, now_us(), where});
  used_ += bytes;
  return t;
}

int64_t Arena::used_bytes(MemTag tag) const {
  int64_t sum = 0;
  for (const Allocation& a : allocations_) sum += a.tag == tag ? align_up(a.bytes) : 0;
  return sum;
}

std::string Arena::report() const {
  std::string out = fmt::format("memory of {}, MiB\n", device_.str());
  for (int i = 0; i < kMemTags; ++i) {
    const MemTag tag = static_cast<MemTag>(i);
    if (const int64_t bytes = used_bytes(tag))
      fmt::format_to(std::back_inserter(out), "  {:<12} {:>12.2f}\n", name_of(tag), bytes / kMiB);
  }
  fmt::format_to(std::back_inserter(out), "  {:<12} {:>12.2f}\nlargest tensors\n", "total", used_ / kMiB);
  std::vector<Allocation> largest = allocations_;
  std::stable_sort(largest.begin(), largest.end(), [](auto& a, auto& b) { return a.bytes > b.bytes; });
  if (largest.size() > 10) largest.resize(10);
  for (const Allocation& a : largest)
    fmt::format_to(std::back_inserter(out), "  {:<40} {:>12.2f}\n", a.name, a.bytes / kMiB);
  return out;
}

PinnedMemory::PinnedMemory(Device device, int64_t bytes)
    : device_(device), data_(backend::allocate_pinned(device, bytes)) {}
PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : device_(other.device_), data_(std::exchange(other.data_, nullptr)) {}
PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) backend::deallocate_pinned(device_, data_);
}

Scratch::Scratch(Arena& arena, int64_t bytes) : device_(arena.device()), planning_(arena.planning()), capacity_(bytes) {
  base_ = planning_ ? planned_base() : arena.alloc(MemTag::workspace, kScratchName, DType::u8, {bytes}).data;
}

Scratch::Scratch(Device device, std::byte* memory, int64_t bytes)
    : device_(device), planning_(memory == nullptr), base_(planning_ ? planned_base() : memory), capacity_(bytes) {}

void Scratch::log_release(int64_t begin) { log_->release(base_ + begin); }

Tensor Scratch::Scope::alloc(DType dtype, const Shape& shape, const char* name, const std::source_location& where) {
  Scratch& s = scratch_;
  const int64_t wanted = bytes_of(name, dtype, shape), bytes = align_up(wanted);
  TRIAD_CHECK(bytes <= INT64_MAX - s.used_, "scratch memory for {} {}{} and what is there already passes 2^63 bytes",
              name, name_of(dtype), shape.str());
  if (!s.planning_ && bytes > s.capacity_ - s.used_)
    throw OutOfMemory(
        fmt::format("scratch memory of {} is used up: {} {}{} needs {:.1f} MiB, {:.1f} of {:.1f} MiB are left",
                    s.device_.str(), name, name_of(dtype), shape.str(), bytes / kMiB, (s.capacity_ - s.used_) / kMiB,
                    s.capacity_ / kMiB),
        bytes, s.capacity_ - s.used_);
  Tensor t(s.base_ + s.used_, dtype, shape, s.device_);
  if (s.log_ != nullptr) s.log_->alloc(t.data, wanted, name, where);
  s.used_ += bytes;
  s.peak_ = std::max(s.peak_, s.used_);
  return t;
}

}  // namespace triad
