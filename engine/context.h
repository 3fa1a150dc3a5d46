// Context: what every op takes first. Runtime: one device's memory, stream and libraries, and the Context that refers
// to them.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/memory.h"
#include "engine/routes.h"
#include "engine/stream.h"

namespace triad {

// The matrix library's handle, workspace and plan cache; kernels/ops/matmul.cu fills it in on first use.
class BlasHandle {
 public:
  virtual ~BlasHandle() = default;
};

class OpListener;  // op_scope.h

// A stream for work beside a context's (engine/fork_join.h), and the events by which they wait for each other.
struct SideStream {
  SideStream(Device device, std::string name, int priority)
      : stream(device, std::move(name), priority), begin(device), end(device) {}
  Stream stream;
  Event begin, end;
  bool busy = false;
};

struct Context {
  Device device;
  Stream& stream;
  Scratch& scratch;
  std::unique_ptr<BlasHandle>& blas;
  Routes& routes;
  int num_sms = 0;
  int compute_capability = 0;  // 90 for sm_90; 0 on the CPU
  int threads = 1;             // that CPU loops are split over
  // A planning context computes nothing: ops check their shapes and ask for their scratch, as in earnest, and touch no
  // memory (parallel_for, launch, matmul, copy and zero return at once). So a dry step tells what a real one needs.
  bool planning = false;
  // Same inputs, same bits, run after run. An op may take a faster order of sums that changes from run to run only
  // where this is false (runtime.deterministic); none has one today.
  bool deterministic = true;
  std::vector<OpListener*>* listeners = nullptr;  // told of every op
  bool in_op = false;                             // kept by OpScope
  std::vector<SideStream>* sides = nullptr;       // for work beside this one's; none on the CPU, and none on a side
  bool is_side = false;

  // The same on another stream, with a scratch of its own.
  Context on(Stream& other, Scratch& its_scratch) const {
    return {.device = device,
            .stream = other,
            .scratch = its_scratch,
            .blas = blas,
            .routes = routes,
            .num_sms = num_sms,
            .compute_capability = compute_capability,
            .threads = threads,
            .planning = planning,
            .deterministic = deterministic,
            .listeners = listeners,
            .in_op = in_op,
            .is_side = true};
  }
};

class Runtime {
 public:
  struct Options {
    Device device;
    int64_t arena_bytes = 0;  // total, scratch included
    int64_t scratch_bytes = 0;
    bool planning = false;
    bool deterministic = true;
    bool side_streams = true;  // on a GPU; without them all work is done in the order of one stream
    KernelChoices kernels = {};
    bool strict = false;  // a fallback is an error
  };
  explicit Runtime(const Options& options);
  ~Runtime();
  Runtime(const Runtime&) = delete;

  Context& ctx() { return ctx_; }
  Arena& arena() { return arena_; }
  Scratch& scratch() { return scratch_; }
  Stream& stream() { return stream_; }
  MemoryLog* memory_log() { return memory_log_.get(); }  // none on a plan

 private:
  Arena arena_;
  Scratch scratch_;
  Stream stream_;
  std::vector<SideStream> sides_;
  std::unique_ptr<BlasHandle> blas_;
  Routes routes_;
  std::unique_ptr<MemoryLog> memory_log_;
  std::vector<OpListener*> listeners_;
  Context ctx_;
};

// Contiguous or strided, same shape and dtype, any pair of devices; on ctx.stream.
void copy(Context& ctx, Tensor dst, ConstTensor src);
// All elements 0. Strided views are fine.
void zero(Context& ctx, Tensor t);
// Copies to the host and waits for it. The only place besides tests and tools where a step may stop.
void read(Context& ctx, void* host, ConstTensor contiguous_src);
void write(Context& ctx, Tensor contiguous_dst, const void* host);

}  // namespace triad
