// Stream: a work queue on one device. Event: a point in that queue. Both own their CUDA object (a borrowed Stream does
// not) and are move-only. On the CPU work runs immediately, in the calling thread.
#pragma once
#include <chrono>
#include <string>
#include <utility>

#include "engine/backend.h"

namespace triad {

class Stream {
 public:
  explicit Stream(Device device, std::string name = "compute", int priority = 0)
      : device_(device), name_(std::move(name)), handle_(backend::create_stream(device, priority)) {}
  // A stream that another library owns: handle is its cudaStream_t, nullptr being the legacy default stream.
  static Stream borrowed(Device device, void* handle) { return Stream(device, handle); }
  ~Stream() {
    if (owned_) backend::destroy_stream(device_, handle_);
  }
  Stream(Stream&& other) noexcept
      : device_(other.device_),
        name_(std::move(other.name_)),
        handle_(std::exchange(other.handle_, nullptr)),
        owned_(other.owned_) {}
  Stream& operator=(Stream&&) = delete;

  Device device() const { return device_; }
  const std::string& name() const { return name_; }
  void* handle() const { return handle_; }  // cudaStream_t; nullptr on the CPU
  void synchronize() const { backend::synchronize(device_, handle_); }

 private:
  Stream(Device device, void* handle) : device_(device), handle_(handle), owned_(false) {}
  Device device_;
  std::string name_;
  void* handle_;
  bool owned_ = true;
};

class Event {
 public:
  explicit Event(Device device, bool timed = false) : device_(device), handle_(backend::create_event(device, timed)) {}
  ~Event() { backend::destroy_event(device_, handle_); }
  Event(Event&& other) noexcept
      : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)), at_(other.at_) {}
  Event& operator=(Event&&) = delete;

  void record(const Stream& on) {
    at_ = std::chrono::steady_clock::now();
    backend::record_event(device_, handle_, on.handle());
  }
  void block(const Stream& stream) const { backend::wait_event(device_, stream.handle(), handle_); }
  void synchronize() const { backend::synchronize_event(device_, handle_); }
  bool reached() const { return backend::reached_event(device_, handle_); }
  // Milliseconds from `begin` to this event; both must be timed. On the CPU: between the two calls to record().
  double ms_since(const Event& begin) const {
    if (!device_.is_cuda()) return std::chrono::duration<double, std::milli>(at_ - begin.at_).count();
    return backend::elapsed_ms(device_, begin.handle_, handle_);
  }

 private:
  Device device_;
  void* handle_;
  std::chrono::steady_clock::time_point at_{};
};

}  // namespace triad
