#include "engine/host_state.h"

#include <algorithm>

#include "engine/check.h"

namespace triad {

namespace {

// An address for tensors that a planning context does not access.
std::byte* planned_address() { return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(kMemAlign)); }
// The device for streams and events; a planning context has none on a GPU.
Device device_of_queues(const Context& ctx) { return ctx.planning ? Device::cpu() : ctx.device; }

}  // namespace

HostState::HostState(Context& ctx, Arena& arena, Options options)
    : options_(std::move(options)),
      in_(device_of_queues(ctx), "state to the device"),
      out_(device_of_queues(ctx), "state to the host"),
      stored_all_(device_of_queues(ctx)),
      written_(device_of_queues(ctx)) {
  constexpr int64_t kPieceUnit = 128;
  const Options& o = options_;
  TRIAD_CHECK(o.elements >= 0 && o.piece > 0 && o.piece % kPieceUnit == 0 && o.slots >= 1,
              "host state of {} elements in pieces of {}, a multiple of {}, through {} slots", o.elements, o.piece,
              kPieceUnit, o.slots);
  if (!ctx.device.is_cuda()) {
    for (const Kind& kind : o.kinds)
      tensors_.push_back(arena.alloc(MemTag::optimizer, o.name, kind.dtype, kind.shape(o.elements)));
    return;
  }
  int64_t bytes = 0;
  for (const Kind& kind : o.kinds) bytes += align_up(o.elements * kind.width * size_of(kind.dtype));
  if (!ctx.planning) memory_.emplace(ctx.device, bytes);
  std::byte* at = memory_ ? memory_->data() : planned_address();
  for (const Kind& kind : o.kinds) {
    tensors_.emplace_back(at, kind.dtype, kind.shape(o.elements), Device::cpu());
    at += align_up(tensors_.back().bytes());
  }
  for (int i = 0; i < o.slots; ++i) {
    Slot& slot = slots_.emplace_back(device_of_queues(ctx));
    for (const Kind& kind : o.kinds)
      slot.tensors.push_back(
          arena.alloc(MemTag::optimizer, o.name, kind.dtype, kind.shape(std::min(o.piece, o.elements))));
  }
}

HostState::~HostState() {
  try {
    in_.synchronize();
    out_.synchronize();
  } catch (...) {}  // the device has failed, and the error is thrown where the host waits for it next
}

void HostState::follow(const Stream& stream) {
  written_.record(stream);
  written_.block(in_);
  written_.block(out_);
}

void HostState::update(Context& ctx, int64_t begin, int64_t end, const Work& work) {
  TRIAD_CHECK(begin >= 0 && begin <= end && end <= options_.elements, "the elements {} to {} of a host state of {}",
              begin, end, options_.elements);
  if (begin == end) return;
  if (!slots_.empty()) wait_for_earlier_updates(begin, end);
  for (int64_t at = begin; at < end; at += options_.piece) {
    const int64_t stop = std::min(at + options_.piece, end);
    if (slots_.empty()) {
      std::vector<Tensor> views;
      for (const Tensor& t : tensors_) views.push_back(t.slice(0, at, stop));
      work(views, at, stop);
    } else {
      pass_through(ctx, slots_[next_slot_], at, stop, work);
      next_slot_ = (next_slot_ + 1) % slots_.size();
    }
  }
  if (!slots_.empty() && !ctx.planning) stored_all_.record(out_);
}

// A range that was updated before may still be on its way to the host. Ranges within a pass do not overlap, so this
// waits once a pass, at its beginning.
void HostState::wait_for_earlier_updates(int64_t begin, int64_t end) {
  const auto overlaps = [&](const std::pair<int64_t, int64_t>& r) { return r.first < end && begin < r.second; };
  if (std::any_of(in_flight_.begin(), in_flight_.end(), overlaps)) {
    stored_all_.block(in_);
    in_flight_.clear();
  }
  in_flight_.emplace_back(begin, end);
}

void HostState::pass_through(Context& ctx, Slot& slot, int64_t begin, int64_t end, const Work& work) {
  std::vector<Tensor> piece;
  for (const Tensor& t : slot.tensors) piece.push_back(t.slice(0, 0, end - begin));
  if (ctx.planning) return work(piece, begin, end);
  slot.stored.block(in_);  // slot's previous piece
  for (size_t i = 0; i < piece.size(); ++i) {
    const Tensor host = tensors_[i].slice(0, begin, end);
    backend::copy(piece[i].data, piece[i].device, host.data, host.device, host.bytes(), in_.handle());
  }
  slot.loaded.record(in_);
  slot.loaded.block(ctx.stream);
  work(piece, begin, end);
  slot.updated.record(ctx.stream);
  slot.updated.block(out_);
  for (size_t i = 0; i < piece.size(); ++i) {
    const Tensor host = tensors_[i].slice(0, begin, end);
    backend::copy(host.data, host.device, piece[i].data, piece[i].device, host.bytes(), out_.handle());
  }
  slot.stored.record(out_);
}

}  // namespace triad
