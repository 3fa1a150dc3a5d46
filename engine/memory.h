// Arena: owns all of a device's long-lived memory. Every allocation has a category and a name; after seal(), alloc()
// throws. Scratch: a region of the arena for temporaries, allocated and released in stack order. A planned Arena or
// Scratch only counts bytes; the addresses that it returns must not be accessed (Context::planning).
#pragma once
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "engine/check.h"
#include "engine/tensor.h"

namespace triad {

class MemoryLog;  // memory_log.h

// Thrown if the device, the arena or the scratch cannot hold an allocation. asked, free: bytes requested and bytes
// available.
class OutOfMemory : public Error {
 public:
  OutOfMemory(const std::string& message, int64_t bytes_asked, int64_t bytes_free)
      : Error(message), asked(bytes_asked), free(bytes_free) {}
  int64_t asked, free;
};

enum class MemTag : uint8_t { params, master, grads, optimizer, activations, workspace, comm, io };
inline constexpr int kMemTags = 8;
const char* name_of(MemTag);

inline constexpr const char* kScratchName = "scratch";  // region name of a Scratch in its arena
inline constexpr int64_t kMemAlign = 256;               // alignment in bytes for every allocation
constexpr int64_t align_up(int64_t n, int64_t to = kMemAlign) { return (n + to - 1) / to * to; }

class Arena {
 public:
  struct Allocation {
    MemTag tag;
    std::string name;
    int64_t offset, bytes;  // arena offset; tensor size without padding
    DType dtype;
    Shape shape;
    int64_t time_us;  // microseconds since 1970
    std::source_location where;
  };
  using Where = std::source_location;

  Arena(Device device, int64_t capacity_bytes);
  static Arena planned(Device device);  // owns no memory, only counts bytes
  ~Arena();
  Arena(Arena&&) noexcept;
  Arena& operator=(Arena&&) = delete;

  // Contents are undefined. Throws OutOfMemory, with the memory table and the requested tensor, if the arena is too
  // small.
  Tensor alloc(MemTag tag, std::string_view name, DType dtype, const Shape& shape, const Where& = Where::current());
  void seal() { sealed_ = true; }

  Device device() const { return device_; }
  bool planning() const { return planning_; }
  const std::byte* base() const { return base_; }
  int64_t used_bytes() const { return used_; }
  int64_t capacity_bytes() const { return capacity_; }
  int64_t used_bytes(MemTag tag) const;
  const std::vector<Allocation>& allocations() const { return allocations_; }
  std::string report() const;  // a table: MiB per category, then the ten largest tensors

 private:
  Arena(Device device, int64_t capacity_bytes, bool planning);
  Device device_;
  int64_t capacity_ = 0, used_ = 0;
  bool planning_ = false, sealed_ = false;
  std::byte* base_ = nullptr;
  std::vector<Allocation> allocations_;
};

// Pinned host memory, for copies that are asynchronous to the host.
class PinnedMemory {
 public:
  PinnedMemory(Device device, int64_t bytes);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept;
  PinnedMemory& operator=(PinnedMemory&&) = delete;
  std::byte* data() const { return data_; }

 private:
  Device device_;
  std::byte* data_;
};

class Scratch {
 public:
  Scratch(Arena& arena, int64_t bytes);  // an unlimited planned scratch if the arena is planned
  // A scratch in memory that the caller owns, aligned to kMemAlign. memory == nullptr: an unlimited planned scratch.
  Scratch(Device device, std::byte* memory, int64_t bytes);
  // Tag for a constructor that makes a scratch for another stream from `of`'s free part. Until the new scratch is
  // destroyed, `of` must not allocate (engine/fork_join.h).
  struct Rest {};
  Scratch(const Scratch& of, Rest)
      : device_(of.device_),
        planning_(of.planning_),
        base_(of.base_ + of.used_),
        capacity_(of.capacity_ - of.used_),
        log_(of.log_) {}
  Scratch(const Scratch&) = delete;
  int64_t peak_bytes() const { return peak_; }
  int64_t capacity_bytes() const { return capacity_; }
  void set_log(MemoryLog* log) { log_ = log; }  // log receives every allocation and release

  // Releases on destruction everything that it allocated. All users of a scratch queue on one stream, so the memory's
  // next owner writes after the last one has read.
  class Scope {
   public:
    explicit Scope(Scratch& scratch) : scratch_(scratch), begin_(scratch.used_) {}
    ~Scope() {
      if (scratch_.log_ != nullptr) scratch_.log_release(begin_);
      scratch_.used_ = begin_;
    }
    Scope(const Scope&) = delete;
    // name: a string literal, for reports.
    Tensor alloc(DType dtype, const Shape& shape, const char* name = "temporary",
                 const std::source_location& = std::source_location::current());

   private:
    Scratch& scratch_;
    int64_t begin_;
  };

 private:
  void log_release(int64_t begin);
  Device device_;
  bool planning_;
  std::byte* base_;
  int64_t capacity_, used_ = 0, peak_ = 0;
  MemoryLog* log_ = nullptr;
};

}  // namespace triad
