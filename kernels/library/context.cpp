// Contexts, errors, and a call's two passes.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "engine/process/cpu_threads.h"
#include "kernels/library/library.h"

namespace triad::library {

namespace {

// The thread's last error message. Its size is fixed, so that reporting an error allocates no memory.
thread_local char last_message[2048] = "";

triad_nsa_status report(triad_nsa_status status, const char* message) noexcept {
  std::strncpy(last_message, message, sizeof last_message - 1);
  last_message[sizeof last_message - 1] = '\0';
  return status;
}

constexpr size_t kMostWorkspaces = 4096;  // most entries in the workspace size record; a full one is cleared
constexpr int kSlots = 4;                 // calls that can use side streams at the same time

// Stream priorities, the same as in engine/context.cpp.
constexpr int kMainPriority = 2, kSidePriority[] = {0, 0, 1};

// Creates a device's side streams. Planning uses the CPU's, which do nothing.
std::vector<SideStream> side_streams(Device device) {
  std::vector<SideStream> sides;
  for (const int priority : kSidePriority) sides.emplace_back(device, "nsa", priority);
  return sides;
}

// Calls body on a Context for `stream`, with `memory` as its scratch (nullptr: planning). Returns the scratch bytes
// used.
size_t run_on(const triad_nsa_context& c, Stream& stream, std::vector<SideStream>* sides, const Options& options,
              std::byte* memory, size_t bytes, const Body& body) {
  Scratch scratch(c.device, memory, static_cast<int64_t>(bytes));
  std::unique_ptr<BlasHandle> no_blas;
  Routes routes(options.kernels);
  Context ctx{.device = c.device,
              .stream = stream,
              .scratch = scratch,
              .blas = no_blas,
              .routes = routes,
              .num_sms = c.traits.num_sms,
              .compute_capability = c.traits.compute_capability,
              .threads = c.threads.load(std::memory_order_relaxed),
              .planning = memory == nullptr,
              .sides = c.device.is_cuda() ? sides : nullptr};
  Call call(c, options, ctx);
  body(call);
  return static_cast<size_t>(scratch.peak_bytes());
}

// Returns the id of the stream's graph capture, 0 on the CPU and if there is none.
unsigned long long valid_capture(Device device, void* stream) {
  if (!device.is_cuda()) return 0;
  const unsigned long long capture = capture_of(stream);
  if (capture == kInvalidCapture)
    reject(TRIAD_NSA_ERROR_CUDA, "the stream's graph capture has been invalidated by an earlier error");
  return capture;
}

// Holds a slot for the duration of a call. get() is nullptr on the CPU, if the call uses one stream, and if no slot is
// free.
class TakenSlot {
 public:
  TakenSlot(triad_nsa_context& c, void* stream, Streams streams) : context_(c) {
    const unsigned long long capture = valid_capture(c.device, stream);
    if (c.device.is_cuda() && (streams != Streams::one || capture != 0)) slot_ = c.take(stream, capture);
  }
  ~TakenSlot() {
    if (slot_ != nullptr) context_.give_back(slot_);
  }
  TakenSlot(const TakenSlot&) = delete;
  Slot* get() const { return slot_; }

 private:
  triad_nsa_context& context_;
  Slot* slot_ = nullptr;
};

// Orders the work on a slot's main stream after what the caller's stream already has queued, and, by join(), before
// what the caller queues later.
class MainStream {
 public:
  MainStream(Slot& slot, const Stream& caller) : main_(slot.main), caller_(caller) {
    main_.begin.record(caller);
    main_.begin.block(main_.stream);
  }
  ~MainStream() {
    try {
      join();
    } catch (...) {}  // the call has already failed with another error
  }
  MainStream(const MainStream&) = delete;
  void join() {
    if (std::exchange(joined_, true)) return;
    main_.end.record(main_.stream);
    main_.end.block(caller_);
  }
  Stream& stream() const { return main_.stream; }

 private:
  SideStream& main_;
  const Stream& caller_;
  bool joined_ = false;
};

}  // namespace

Slot::Slot(Device device) : main(device, "nsa", kMainPriority), sides(side_streams(device)) {}

triad_nsa_status guarded(const std::function<void()>& body) noexcept {
  try {
    body();
    return TRIAD_NSA_OK;
  } catch (const StatusError& e) {
    return report(e.status, e.what());
  } catch (const UsageError& e) {  // a kernel does not support the arguments
    return report(TRIAD_NSA_ERROR_ARGUMENT, e.what());
  } catch (const std::bad_alloc&) {
    return report(TRIAD_NSA_ERROR_MEMORY, "the host is out of memory");
  } catch (const std::exception& e) { return report(TRIAD_NSA_ERROR_INTERNAL, e.what()); } catch (...) {
    return report(TRIAD_NSA_ERROR_INTERNAL, "an unknown exception");
  }
}

size_t planned_bytes(const triad_nsa_context& c, const Options& options, const Body& body) {
  Stream stream = Stream::borrowed(Device::cpu(), nullptr);
  std::vector<SideStream> sides;
  if (c.device.is_cuda()) sides = side_streams(Device::cpu());
  // The added bytes serve to align the workspace. With them, no call needs 0 bytes.
  return run_on(c, stream, &sides, options, nullptr, 0, body) + static_cast<size_t>(kMemAlign);
}

void run(triad_nsa_context* c, void* stream, const Options& options, const Key& key, void* workspace,
         size_t* workspace_bytes, const Body& body, Streams streams) {
  if (workspace_bytes == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "workspace_bytes is NULL");
  size_t needed = 0;
  {
    const std::lock_guard lock(c->mutex);
    const auto known = c->workspaces.find(key.bytes());
    if (known != c->workspaces.end()) needed = known->second;
  }
  if (needed == 0 || workspace == nullptr) {  // a query always plans, which checks its arguments
    try {
      needed = planned_bytes(*c, options, body);
    } catch (const StatusError&) { throw; } catch (const Error& e) {
      // The arguments have passed the checks, but an op refuses them: on a GPU, it has no kernel for the shapes.
      if (c->device.is_cuda()) reject(TRIAD_NSA_ERROR_UNSUPPORTED, "{}", e.what());
      throw;
    }
    const std::lock_guard lock(c->mutex);
    if (c->workspaces.size() >= kMostWorkspaces) c->workspaces.clear();
    c->workspaces[key.bytes()] = needed;
  }
  if (workspace == nullptr) {
    *workspace_bytes = needed;
    return;
  }
  if (*workspace_bytes < needed)
    reject(TRIAD_NSA_ERROR_WORKSPACE, "the workspace has {} bytes, and this call needs {}", *workspace_bytes, needed);
  auto* const memory = reinterpret_cast<std::byte*>(align_up(reinterpret_cast<intptr_t>(workspace)));
  const size_t usable = needed - static_cast<size_t>(kMemAlign);
  try {
    const CurrentDevice current(c->device);
    const TakenSlot slot(*c, stream, streams);
    Stream caller = Stream::borrowed(c->device, stream);
    if (slot.get() == nullptr) {
      run_on(*c, caller, nullptr, options, memory, usable, body);
    } else if (streams != Streams::all) {
      run_on(*c, caller, &slot.get()->sides, options, memory, usable, body);
    } else {
      MainStream main(*slot.get(), caller);
      run_on(*c, main.stream(), &slot.get()->sides, options, memory, usable, body);
      main.join();
    }
  } catch (const StatusError&) { throw; } catch (const UsageError&) {
    throw;
  } catch (const Error& e) {
    if (!c->device.is_cuda()) throw;
    // The plan has passed all op checks, so this is a CUDA error.
    const bool no_kernel = std::string(e.what()).find("no kernel image") != std::string::npos;
    reject(no_kernel ? TRIAD_NSA_ERROR_UNSUPPORTED : TRIAD_NSA_ERROR_CUDA, "{}", e.what());
  }
}

}  // namespace triad::library

using namespace triad;
using namespace triad::library;

triad_nsa_context::triad_nsa_context(Device on, bool with_streams) : device(on), threads(1) {
  if (!on.is_cuda()) {
    threads = cpu_threads();
    return;
  }
  if (!with_streams) return;
  for (int i = 0; i < kSlots; ++i) { slots.push_back(std::make_unique<Slot>(on)); }
}

// Streams that have joined a graph capture belong to it until it ends. So a call may use a slot if the slot's streams
// belong to no capture, or to the same one as the call's stream.
Slot* triad_nsa_context::take(void* stream, unsigned long long capture) {
  const std::lock_guard lock(mutex);
  Slot* best = nullptr;  // slot of the last call on the same stream, else the one used longest ago
  for (const std::unique_ptr<Slot>& slot : slots) {
    if (slot->taken) continue;
    if (slot->captured) {
      const unsigned long long its = capture_of(slot->sides[0].stream.handle());
      if (its != 0 && its != capture) continue;
      slot->captured = its != 0;
    }
    const bool same = slot->last_call > 0 && slot->last_stream == stream;
    if (best == nullptr || same || slot->last_call < best->last_call) best = slot.get();
    if (same) break;
  }
  if (best == nullptr) return nullptr;
  best->taken = true, best->last_stream = stream, best->last_call = ++calls;
  best->captured = best->captured || capture != 0;
  return best;
}

void triad_nsa_context::give_back(Slot* slot) noexcept {
  for (SideStream& side : slot->sides) side.busy = false;  // an exception may have left it true
  const std::lock_guard lock(mutex);
  slot->taken = false;
}

extern "C" {

const char* triad_nsa_last_error(void) { return last_message; }

const char* triad_nsa_status_name(int status) {
  switch (status) {
    case TRIAD_NSA_OK:
      return "TRIAD_NSA_OK";
    case TRIAD_NSA_ERROR_ARGUMENT:
      return "TRIAD_NSA_ERROR_ARGUMENT";
    case TRIAD_NSA_ERROR_STRIDE:
      return "TRIAD_NSA_ERROR_STRIDE";
    case TRIAD_NSA_ERROR_BOUNDS:
      return "TRIAD_NSA_ERROR_BOUNDS";
    case TRIAD_NSA_ERROR_DEVICE:
      return "TRIAD_NSA_ERROR_DEVICE";
    case TRIAD_NSA_ERROR_UNSUPPORTED:
      return "TRIAD_NSA_ERROR_UNSUPPORTED";
    case TRIAD_NSA_ERROR_WORKSPACE:
      return "TRIAD_NSA_ERROR_WORKSPACE";
    case TRIAD_NSA_ERROR_CUDA:
      return "TRIAD_NSA_ERROR_CUDA";
    case TRIAD_NSA_ERROR_MEMORY:
      return "TRIAD_NSA_ERROR_MEMORY";
    case TRIAD_NSA_ERROR_INTERNAL:
      return "TRIAD_NSA_ERROR_INTERNAL";
    case TRIAD_NSA_ERROR_LISTS:
      return "TRIAD_NSA_ERROR_LISTS";
    default:
      return "an unknown status";
  }
}

int triad_nsa_version(void) { return TRIAD_NSA_VERSION; }

const char* triad_nsa_build_info(void) {
  static const std::string text = build_info();
  return text.c_str();
}

int triad_nsa_cuda_device_count(void) { return backend::cuda_device_count(); }

triad_nsa_status triad_nsa_context_create(triad_nsa_context** context, int device) {
  return guarded([&] {
    if (context == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "context is NULL");
    *context = nullptr;
    if (device == TRIAD_NSA_CPU) {
      *context = new triad_nsa_context(Device::cpu());
      return;
    }
    if (device < 0) reject(TRIAD_NSA_ERROR_DEVICE, "device is {}: -1 (the CPU) or a CUDA ordinal is allowed", device);
    if (!kBuiltWithCuda)
      reject(TRIAD_NSA_ERROR_UNSUPPORTED, "device {} was asked for, and this library was built without CUDA", device);
    const int count = backend::cuda_device_count();
    if (device >= count)
      reject(TRIAD_NSA_ERROR_DEVICE, "device {} was asked for, and there are {} GPUs{}", device, count,
             count == 0 ? " (" + backend::why_no_cuda() + ")" : "");
    const CurrentDevice current(Device::cuda(device));
    const DeviceTraits traits = device_traits(device);
    if (traits.compute_capability < 80)
      reject(TRIAD_NSA_ERROR_UNSUPPORTED, "device {} has compute capability {}.{}, and the kernels need 8.0", device,
             traits.compute_capability / 10, traits.compute_capability % 10);
    auto made = std::make_unique<triad_nsa_context>(Device::cuda(device));
    made->traits = traits;
    *context = made.release();
  });
}

void triad_nsa_context_destroy(triad_nsa_context* context) { delete context; }

int triad_nsa_context_device(const triad_nsa_context* context) {
  return context == nullptr || !context->device.is_cuda() ? TRIAD_NSA_CPU : context->device.index;
}

triad_nsa_status triad_nsa_context_set_threads(triad_nsa_context* context, int threads) {
  return guarded([&] {
    if (context == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "context is NULL");
    if (threads < 1) reject(TRIAD_NSA_ERROR_ARGUMENT, "threads is {}: at least 1 is needed", threads);
    context->threads = threads;
  });
}

}  // extern "C"
