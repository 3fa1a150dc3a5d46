// Graph: work recorded once from a stream and launched as a whole, so that a step of hundreds of small kernels has no
// launch overhead for each. The graph holds the addresses and sizes of the recording: that memory must not move.
#pragma once
#include <utility>

#include "engine/check.h"
#include "engine/context.h"

namespace triad {

namespace backend {
// As record_event and wait_event. Inside a recording they become nodes of the graph, executed anew by each launch.
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
  // Records the work that work() queues on ctx.stream, which must be of a GPU, instead of running it. The same work
  // must have run once before, so that libraries and kernels are loaded.
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

// An event within work that may be recorded as a graph, for which other streams wait after each launch; or an event of
// another stream for which such work waits.
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
