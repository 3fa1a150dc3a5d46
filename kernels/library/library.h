// What the functions of triad_nsa.h share: errors with a status, a context's state, the arguments of a call, and the
// two runs of a call, one that measures the workspace and one that queues the work.
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

// An error that the caller of the C interface made; the other exceptions become a status in guarded().
class StatusError : public Error {
 public:
  StatusError(triad_nsa_status status, const std::string& message) : Error(message), status(status) {}
  triad_nsa_status status;
};
template <class... Args>
[[noreturn]] void reject(triad_nsa_status status, fmt::format_string<Args...> format, Args&&... args) {
  throw StatusError(status, fmt::vformat(format, fmt::make_format_args(args...)));
}

// Runs body() and turns its exceptions into a status and the thread's last message. No exception leaves it.
triad_nsa_status guarded(const std::function<void()>& body) noexcept;

// The streams that a call has for itself while it queues its work. The kernels of `main` have priority over those of
// `sides`, which a caller's stream cannot have.
struct Slot {
  explicit Slot(Device device);
  SideStream main;
  std::vector<SideStream> sides;
  void* last_stream = nullptr;  // of the last call; calls on the same stream prefer this slot
  int64_t last_call = 0;        // its number; 0: none
  bool taken = false;
};

// Bytes that identify a call up to its addresses, for the record of workspace sizes.
class Key {
 public:
  explicit Key(const char* function) : bytes_(function) {}
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

// A pair of calls of one function: what is checked and queued, given the call's state.
class Call;
using Body = std::function<void(Call&)>;

// The options as the ops take them. factor: by what q is multiplied, since the ops' scale is 1 / sqrt(dk).
struct Options : SelectOptions {
  int64_t w = 512;
  double scale = 0;
  KernelChoices kernels;
  bool check_pointers = true, signed_gates = false;
  double factor(int64_t dk) const;
};
Options read_options(const triad_nsa_options*);

// One run of a function: reads the arguments into tensors and owns the Context for the ops. A planning run takes any
// address, checks all that does not depend on the contents of memory, and measures the workspace.
class Call {
 public:
  enum class Strides { heads, any, contiguous };  // heads: stride 1 on the last axis, no overlap; any: gates

  Call(const triad_nsa_context& context, const Options& options, Context& ctx)
      : options(options), ctx(ctx), context_(context) {}

  // The tensor `name`; throws a StatusError unless it has this rank and possible strides, and memory of the device.
  Tensor tensor(const std::string& name, const triad_nsa_tensor&, int rank, Strides = Strides::heads,
                bool written = false) const;
  Tensor tensor(const std::string& name, const triad_nsa_tensor*, int rank, Strides = Strides::heads,
                bool written = false) const;
  // A contiguous tensor at an address. nullptr: in the scope's scratch.
  Tensor at(const std::string& name, void* address, DType dtype, const Shape& shape, Scratch::Scope& scope) const;
  // Throws a StatusError unless t has this shape and one of the dtypes.
  void expect(const std::string& name, const ConstTensor& t, const Shape& shape, DType dtype) const;
  void expect(const std::string& name, const ConstTensor& t, const Shape& shape, DType dtype, DType or_dtype) const;
  // Throws unless a tensor of this shape, which the arguments imply, has a possible size.
  void expect_count(int64_t B, int64_t T, int64_t heads, int64_t width) const;
  // Throws unless the device computes q's dtype.
  void expect_element(const std::string& name, const ConstTensor& q) const;
  // Fills the tables of packed rows in the scope's scratch; no documents: absent.
  Documents documents(const triad_nsa_documents*, int64_t B, int64_t T, Scratch::Scope& scope) const;

  bool planning() const { return ctx.planning; }
  const Options& options;
  Context& ctx;

 private:
  std::byte* address(const std::string& name, void* data, DType dtype, int64_t numel) const;
  const triad_nsa_context& context_;
};

// Runs `body` as triad_nsa.h says of every function with a workspace: measures, or checks the workspace and queues.
// large: the work is so long that its order on the GPU matters more than the events that Slot::main needs.
void run(triad_nsa_context*, void* stream, const Options&, const Key&, void* workspace, size_t* workspace_bytes,
         const Body& body, bool large = false);
// The bytes of scratch that body takes, on a context for `device` that queues nothing.
size_t planned_bytes(const triad_nsa_context&, const Options&, const Body& body);

// ---- the device, with and without CUDA (device_cuda.cpp, device_none.cpp) ----

// Makes a GPU the current device of the thread, and the former one again at the end.
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
// The number of the graph capture that a stream takes part in; 0: none.
inline constexpr unsigned long long kInvalidCapture = ~0ULL;  // of a capture that an error has made invalid
unsigned long long capture_of(void* stream);
// Where memory is: a CUDA ordinal, kHost, or kAnywhere (managed memory, which every device reads).
inline constexpr int kHost = -1, kAnywhere = -2;
int device_of(const void* address);
std::string build_info();

// Throws TRIAD_NSA_ERROR_BOUNDS unless the bounds, in host memory, are in order.
void check_host_bounds(const int32_t* bounds, int64_t count, int64_t B, int64_t T, int64_t most);
inline int64_t max_documents(const triad_nsa_documents& d) { return d.max_per_row > 0 ? d.max_per_row : d.count; }

}  // namespace triad::library

// The type behind the opaque handle.
struct triad_nsa_context {
  triad::Device device;
  triad::library::DeviceTraits traits;
  std::atomic<int> threads{1};
  std::mutex mutex;  // of slots, calls and workspaces
  std::vector<std::unique_ptr<triad::library::Slot>> slots;
  int64_t calls = 0;                                   // that have taken a slot
  std::unordered_map<std::string, size_t> workspaces;  // bytes by Key

  explicit triad_nsa_context(triad::Device device, bool with_streams = true);
  // A free slot whose side streams a call on `stream` may use; nullptr: there is none, so the call uses its own stream
  // alone.
  triad::library::Slot* take(void* stream);
  void give_back(triad::library::Slot*) noexcept;
};
