// Arena: the one owner of a device's long-lived memory; every allocation has a category and a name, and after seal()
// there are no more. Scratch: a region of it for temporaries, handed out and taken back in stack order.
// Both also exist as a plan: they count bytes and hand out addresses that nobody may touch (see Context::planning).
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "engine/tensor.h"

namespace triad {

enum class MemTag : uint8_t { params, master, grads, optimizer, activations, workspace, comm, io };
inline constexpr int kMemTags = 8;
const char* name_of(MemTag);

inline constexpr int64_t kMemAlign = 256;  // bytes; every allocation starts at a multiple
constexpr int64_t align_up(int64_t n, int64_t to = kMemAlign) { return (n + to - 1) / to * to; }

class Arena {
 public:
  struct Allocation {
    MemTag tag;
    std::string name;
    int64_t offset, bytes;
  };

  Arena(Device device, int64_t capacity_bytes);
  static Arena planned(Device device);  // owns nothing, counts everything
  ~Arena();
  Arena(Arena&&) noexcept;
  Arena& operator=(Arena&&) = delete;

  // Contents are undefined. Out of room: throws with the memory table and the tensor asked for.
  Tensor alloc(MemTag tag, std::string_view name, DType dtype, const Shape& shape);
  void seal() { sealed_ = true; }

  Device device() const { return device_; }
  bool planning() const { return planning_; }
  int64_t used_bytes() const { return used_; }
  int64_t capacity_bytes() const { return capacity_; }
  int64_t used_bytes(MemTag tag) const;
  const std::vector<Allocation>& allocations() const { return allocations_; }
  std::string report() const;  // a table: MiB by category, then the ten largest tensors

 private:
  Arena(Device device, int64_t capacity_bytes, bool planning);
  Device device_;
  int64_t capacity_ = 0, used_ = 0;
  bool planning_ = false, sealed_ = false;
  std::byte* base_ = nullptr;
  std::vector<Allocation> allocations_;
};

// Host memory that a device copies from and to while the host goes on.
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
  Scratch(Arena& arena, int64_t bytes);  // a planned arena makes a planned scratch, without limit
  // What `of` has left, as a scratch for work of another stream; `of` must not hand it out meanwhile (beside.h).
  struct Rest {};
  Scratch(const Scratch& of, Rest)
      : device_(of.device_), planning_(of.planning_), base_(of.base_ + of.used_), capacity_(of.capacity_ - of.used_) {}
  Scratch(const Scratch&) = delete;
  int64_t peak_bytes() const { return peak_; }

  // Everything a scope handed out is free again when it ends. Work on the one stream that uses this scratch is ordered,
  // so the next owner's writes come after the last owner's reads.
  class Scope {
   public:
    explicit Scope(Scratch& scratch) : scratch_(scratch), begin_(scratch.used_) {}
    ~Scope() { scratch_.used_ = begin_; }
    Scope(const Scope&) = delete;
    Tensor alloc(DType dtype, const Shape& shape);

   private:
    Scratch& scratch_;
    int64_t begin_;
  };

 private:
  Device device_;
  bool planning_;
  std::byte* base_;
  int64_t capacity_, used_ = 0, peak_ = 0;
};

}  // namespace triad
