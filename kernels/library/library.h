// What triad_nsa.h's functions share: errors with a status, a context's state, a call's arguments, and its two passes,
// one that measures the workspace and one that queues the work.
#pragma once
#include <fmt/core.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/check.h"
#include "engine/context.h"
#include "kernels/library/triad_nsa.h"
#include "kernels/nsa/document_tables.h"
#include "kernels/nsa/select.h"

namespace triad::library {

// An error with a C interface status. guarded() chooses the status for all other exceptions.
class StatusError : public Error {
 public:
  StatusError(triad_nsa_status status, const std::string& message) : Error(message), status(status) {}
  triad_nsa_status status;
};
template <class... Args>
[[noreturn]] void reject(triad_nsa_status status, fmt::format_string<Args...> format, Args&&... args) {
  throw StatusError(status, fmt::vformat(format, fmt::make_format_args(args...)));
}

// Returns a caller's struct. Throws unless its struct_size, which is read before any other field, is the library's.
template <class Struct>
const Struct& sized(const char* name, const Struct* from) {
  if (from == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "{} is NULL", name);
  if (from->struct_size != sizeof *from)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "{}.struct_size is {}, not {}", name, from->struct_size, sizeof *from);
  return *from;
}

// Runs body() and turns its exceptions into a status and the thread's last message. No exception leaves it.
triad_nsa_status guarded(const std::function<void()>& body) noexcept;

// Streams that only one call at a time uses, while it queues its work. Kernels on `main` have priority over those on
// `sides`; kernels on the caller's stream would not.
struct Slot {
  explicit Slot(Device device);
  SideStream main;
  std::vector<SideStream> sides;
  void* last_stream = nullptr;  // the last call's stream; calls on the same stream prefer this slot
  int64_t last_call = 0;        // that call's number; 0: there was none
  bool captured = false;        // whether a call in a graph capture has used the streams, which may still belong to it
  bool taken = false;
};

// A call's key in the workspace size record: its function and all arguments except addresses, as bytes.
class Key {
 public:
  explicit Key(const char* function) : bytes_(function) {
    constexpr size_t kMost = 2048;  // enough for every function, so that it is allocated once
    bytes_.reserve(kMost);
  }
  template <class Value>
  Key& add(const Value& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Key& add(const triad_nsa_tensor& tensor);
  Key& add(const triad_nsa_tensor* tensor) { return tensor == nullptr ? add('-') : add(*tensor); }
  Key& add(const triad_nsa_documents* documents);
  Key& add(const triad_nsa_options& options);
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// A Body is the code of one triad_nsa.h function: it checks the arguments and queues the work. It runs once to measure
// the workspace and once to queue.
class Call;
using Body = std::function<void(Call&)>;

// The options as the ops take them. factor(): what q is multiplied by first, because the ops' scale is always 1 /
// sqrt(dk).
struct Options : SelectOptions {
  int64_t w = 512;
  double scale = 0;
  KernelChoices kernels;
  bool check_pointers = true, signed_gates = false, given_lists = false;
  double factor(int64_t dk) const;
};
Options read_options(const triad_nsa_options*);

// One pass through a function: reads the arguments into tensors, and has the Context for the ops. A planning pass
// accepts any address, checks everything that does not depend on memory contents, and measures the workspace.
class Call {
 public:
  enum class Strides { heads, any, contiguous };  // heads: stride 1 on the last axis, no overlap; any: for gates

  Call(const triad_nsa_context& context, const Options& options, Context& ctx)
      : options(options), ctx(ctx), context_(context) {}

  // Returns the tensor `name`. Throws a StatusError unless it has this rank, the required strides, and memory on the
  // device. written: the function writes the tensor, so no two elements may share memory.
  Tensor tensor(const std::string& name, const triad_nsa_tensor&, int rank, Strides = Strides::heads,
                bool written = false) const;
  Tensor tensor(const std::string& name, const triad_nsa_tensor*, int rank, Strides = Strides::heads,
                bool written = false) const;
  // Returns a contiguous tensor at the address, or, if that is nullptr, in the scope's scratch.
  Tensor at(const std::string& name, void* address, DType dtype, const Shape& shape, Scratch::Scope& scope) const;
  // Throws a StatusError unless t has this shape and one of these dtypes.
  void expect(const std::string& name, const ConstTensor& t, const Shape& shape, DType dtype) const;
  void expect(const std::string& name, const ConstTensor& t, const Shape& shape, DType dtype, DType or_dtype) const;
  // Throws if a tensor with this shape, which follows from the arguments, would be too large.
  void expect_count(int64_t B, int64_t T, int64_t heads, int64_t width) const;
  // Throws unless the device has kernels for q's dtype.
  void expect_element(const std::string& name, const ConstTensor& q) const;
  // Fills the packed-row tables in the scope's scratch. Returns absent tables if there are no documents.
  Documents documents(const triad_nsa_documents*, int64_t B, int64_t T, Scratch::Scope& scope) const;

  bool planning() const { return ctx.planning; }
  const Options& options;
  Context& ctx;

 private:
  std::byte* address(const std::string& name, void* data, DType dtype, int64_t numel) const;
  const triad_nsa_context& context_;
};

// A call's streams. Each further stream costs the host the time for four CUDA calls, two events and two waits.
enum class Streams {
  one,    // the caller's alone, but in a graph capture, where the host's time does not matter, as `sides`
  sides,  // Slot::sides too
  all,    // and Slot::main, whose priority saves more time than its events cost if kernels run for long
};

// Runs `body` as triad_nsa.h specifies for every function with a workspace: without a workspace it measures the size;
// with one it checks the size and queues the work.
void run(triad_nsa_context*, void* stream, const Options&, const Key&, void* workspace, size_t* workspace_bytes,
         const Body& body, Streams streams = Streams::sides);
// Returns the scratch bytes that `body` needs, without queuing anything.
size_t planned_bytes(const triad_nsa_context&, const Options&, const Body& body);

// ---- the device, with and without CUDA (device_cuda.cpp, device_none.cpp) ----

// Makes a GPU the thread's current device. The destructor restores the former one.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;

 private:
  [[maybe_unused]] int before_ = -1;  // -1: nothing to restore
};
struct DeviceTraits {
  int num_sms = 0, compute_capability = 0;
};
DeviceTraits device_traits(int ordinal);
// Returns the id of the stream's graph capture; 0 if none; kInvalidCapture if an error has made the capture invalid.
inline constexpr unsigned long long kInvalidCapture = ~0ULL;
unsigned long long capture_of(void* stream);
// Returns where memory is: a CUDA ordinal, kHost, or kAnywhere (managed memory, which every device can read).
inline constexpr int kHost = -1, kAnywhere = -2;
int device_of(const void* address);
std::string build_info();

// Throws TRIAD_NSA_ERROR_BOUNDS unless the bounds, in host memory, are in order.
void check_host_bounds(const int32_t* bounds, int64_t count, int64_t B, int64_t T, int64_t most);
// Copies integers on the context's device to the host, and waits for the stream.
std::vector<int32_t> on_host(const triad_nsa_context&, void* stream, const void* from, int64_t count);
// Returns the bounds, on the host and checked.
std::vector<int32_t> host_bounds(const triad_nsa_context&, void* stream, int64_t B, int64_t T,
                                 const triad_nsa_documents&);
inline int64_t max_documents(const triad_nsa_documents& d) { return d.max_per_row > 0 ? d.max_per_row : d.count; }

}  // namespace triad::library

// Defines the type that is opaque in triad_nsa.h.
struct triad_nsa_context {
  triad::Device device;
  triad::library::DeviceTraits traits;
  std::atomic<int> threads{1};
  std::mutex mutex;  // protects slots, calls and workspaces
  std::vector<std::unique_ptr<triad::library::Slot>> slots;
  int64_t calls = 0;                                   // calls that have taken a slot
  std::unordered_map<std::string, size_t> workspaces;  // bytes by Key

  explicit triad_nsa_context(triad::Device device, bool with_streams = true);
  // Takes a free slot whose side streams a call on `stream`, which belongs to this capture (0: none), may use. Returns
  // nullptr if there is none; the call then uses only its own stream.
  triad::library::Slot* take(void* stream, unsigned long long capture);
  void give_back(triad::library::Slot*) noexcept;
};
