// Graph: work recorded once from a stream and then launched as a whole, so that a step of some hundred small kernels
// does not wait for the host to launch each. It holds addresses and sizes as they were: memory must stay where it is.
#pragma once
#include <utility>

#include "engine/check.h"
#include "engine/context.h"

namespace triad {

namespace backend {
// As record_event and wait_event; in work that is being recorded, each launch of it does so anew.
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
  // Records what work() queues on ctx.stream, on a GPU, in place of running it. Libraries and kernels have to be
  // loaded: the same work must have run once before.
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

// A point in the midst of work, recorded as a graph or not, from which on other streams may go on: they wait for it
// after the work was launched, each time anew. Or a point of another stream that such work waits for.
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
