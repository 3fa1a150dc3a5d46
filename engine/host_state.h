// HostState: tensors in host memory that the device updates piece by piece, for state that does not fit into the
// device's memory (an optimizer's moments and master weights). A piece is copied to a staging slot on the device, the
// work on it is queued, and the result is copied back:
//
//   HostState state(ctx, arena, {.kinds = {DType::f32, DType::f32}, .elements = n});  // two tensors [n]
//   state.update(ctx, 0, n, [&](std::span<const Tensor> piece, int64_t begin, int64_t end) {
//     adamw(ctx, ..., piece[0], piece[1], grads.slice(0, begin, end), ...);
//   });
//
// The copies run on two separate streams. With three slots, copying piece k + 1 to the device, the work on piece k and
// copying piece k - 1 to the host run at the same time, so a pass takes as long as the bus needs for one direction. The
// first copies to the device do not wait for the work queued on ctx before.
//
// On the CPU the tensors are in the arena, and the work gets views of them.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/context.h"

namespace triad {

class HostState {
 public:
  // A state tensor: its dtype, and how many values it has per element (width). The shape is [elements] if the width is
  // 1, else [elements, width].
  struct Kind {
    DType dtype;
    int64_t width;
    Kind(DType dtype_, int64_t width_ = 1) : dtype(dtype_), width(width_) {}  // NOLINT: a dtype alone is a kind
    Shape shape(int64_t elements) const { return width == 1 ? Shape{elements} : Shape{elements, width}; }
  };
  struct Options {
    std::vector<Kind> kinds;  // the tensors' kinds
    int64_t elements = 0;
    int64_t piece = int64_t{4} << 20;  // elements per piece, a multiple of 128
    int slots = 3;
    std::string name = "optimizer's pieces";  // name of the staging slots in the arena
  };
  // Allocates pinned host memory, and the slots in the arena (on a planning context only the slots are counted). The
  // contents are undefined.
  HostState(Context&, Arena&, Options);
  ~HostState();  // waits for the copies
  HostState(const HostState&) = delete;

  // Tensor i as a whole, in host memory, which device kernels can access too. The host may read and write it after
  // synchronize(), until the next update(). Work queued on a stream may copy it to the device after arrive(), and may
  // write it between arrive() and follow(). (copy() from host memory to host memory is not queued, so it belongs to the
  // host.)
  Tensor whole(size_t i) const { return tensors_[i]; }
  // Waits until every update() queued so far has arrived in host memory.
  void synchronize() const { stored_all_.synchronize(); }
  // Makes the stream wait until every update() queued so far has arrived in host memory.
  void arrive(const Stream& stream) const { stored_all_.block(stream); }
  // Makes later updates wait for the work queued on the stream so far.
  void follow(const Stream& stream);

  // The elements [begin, end) of each tensor, on the context's device; to be updated by work queued on ctx.stream.
  using Work = std::function<void(std::span<const Tensor> piece, int64_t begin, int64_t end)>;
  // Queues the work on the pieces of [begin, end), in ascending order. Does not wait for the device. An element that an
  // earlier call has updated has its new value.
  void update(Context&, int64_t begin, int64_t end, const Work&);

 private:
  struct Slot {
    explicit Slot(Device device) : loaded(device), updated(device), stored(device) {}
    std::vector<Tensor> tensors;
    Event loaded, updated, stored;  // the piece is on the device; its work is done; it is in host memory again
  };
  void wait_for_earlier_updates(int64_t begin, int64_t end);
  void pass_through(Context&, Slot&, int64_t begin, int64_t end, const Work&);

  Options options_;
  std::optional<PinnedMemory> memory_;  // GPU only
  std::vector<Tensor> tensors_;
  Stream in_, out_;  // copies to the device and to the host
  std::vector<Slot> slots_;
  size_t next_slot_ = 0;
  Event stored_all_;  // everything queued on out_ so far
  Event written_;     // work queued on follow()'s stream
  // Ranges whose copies to the host in_ may not have waited for.
  std::vector<std::pair<int64_t, int64_t>> in_flight_;
};

}  // namespace triad
