// Graph: work recorded once from a stream and launched as a whole, so that a step with hundreds of small kernels has no
// launch overhead for each. The graph holds the addresses and sizes from the recording: that memory must not move.
#pragma once
#include <utility>

#include "engine/check.h"
#include "engine/context.h"

namespace triad {

namespace backend {
// As record_event() and wait_event(), but inside a recording they become graph nodes: each launch records the event, or
// waits for it, anew.
void record_event_of_graph(Device, void* event, void* stream);
void wait_event_of_graph(Device, void* stream, void* event);
}  // namespace backend

class Graph {
 public:
  explicit Graph(Device device) : device_(device) {}
  ~Graph() { backend::destroy_graph(device_, handle_); }
  Graph(Graph&& other) noexcept : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}
  Graph& operator=(Graph&&) = delete;

  bool recorded() const { return handle_ != nullptr; }
  // Calls work() and records what it queues on ctx.stream, a GPU's stream, instead of running it. The same work must
  // have run once before, so that libraries and kernels are loaded.
  template <class Work>
  void record(Context& ctx, Work&& work) {
    TRIAD_CHECK(device_.is_cuda(), "graphs are recorded on a GPU, not on {}", device_.str());
    clear();
    backend::begin_recording(device_, ctx.stream.handle());
    try {
      work();
    } catch (...) {
      backend::abandon_recording(device_, ctx.stream.handle());
      throw;
    }
    handle_ = backend::end_recording(device_, ctx.stream.handle());
  }
  void launch(const Stream& stream) const { backend::launch_graph(device_, handle_, stream.handle()); }
  void clear() { backend::destroy_graph(device_, std::exchange(handle_, nullptr)); }

 private:
  Device device_;
  void* handle_ = nullptr;
};

// An event that crosses a graph's boundary: the graph's work records it and other streams wait for it after each
// launch, or another stream records it and the graph's work waits for it. Also works if nothing is recorded as a graph.
class GraphEvent {
 public:
  explicit GraphEvent(Device device) : device_(device), handle_(backend::create_event(device, /*timed=*/false)) {}
  ~GraphEvent() { backend::destroy_event(device_, handle_); }
  GraphEvent(GraphEvent&& other) noexcept : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}
  GraphEvent& operator=(GraphEvent&&) = delete;

  void record(const Stream& on) { backend::record_event_of_graph(device_, handle_, on.handle()); }
  void block(const Stream& stream) const { backend::wait_event_of_graph(device_, stream.handle(), handle_); }

 private:
  Device device_;
  void* handle_;
};

}  // namespace triad
