// Context: the first argument of every op. Runtime: owns one device's memory, stream and libraries; a Context refers to
// them.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/memory.h"
#include "engine/routes.h"
#include "engine/stream.h"

namespace triad {

// Handle, workspace and plan cache for the matrix library, cuBLASLt. kernels/ops/matmul.cu derives from it and creates
// it at the first product.
class BlasHandle {
 public:
  virtual ~BlasHandle() = default;
};

class OpListener;  // op_scope.h

// A stream for work concurrent with a context's own (engine/fork_join.h), and the events that order the two.
struct SideStream {
  SideStream(Device device, std::string name, int priority)
      : stream(device, std::move(name), priority), begin(device), end(device) {}
  Stream stream;
  Event begin, end;
  bool busy = false;  // an open ForkJoin uses it
};

struct Context {
  Device device;
  Stream& stream;
  Scratch& scratch;
  std::unique_ptr<BlasHandle>& blas;
  Routes& routes;
  int num_sms = 0;
  int compute_capability = 0;  // 90 for sm_90; 0 on the CPU
  bool portable_only = false;  // ops use only kernels that run on any card
  int threads = 1;             // CPU threads that loops are split over
  // A planning context computes nothing. Ops check their shapes and allocate scratch as usual but touch no memory
  // (parallel_for, launch, matmul, copy and zero do nothing), so a dry step measures a real one's memory.
  bool planning = false;
  std::vector<OpListener*>* listeners = nullptr;  // listeners, called at every op's begin and end
  bool in_op = false;                             // whether an op is under way; set by OpScope
  std::vector<SideStream>* sides = nullptr;       // streams for ForkJoin; null on the CPU and on a side stream
  bool is_side = false;                           // this context queues on a side stream

  // Returns this context on another stream, with that stream's scratch.
  Context on(Stream& other, Scratch& other_scratch) const {
    return {.device = device,
            .stream = other,
            .scratch = other_scratch,
            .blas = blas,
            .routes = routes,
            .num_sms = num_sms,
            .compute_capability = compute_capability,
            .portable_only = portable_only,
            .threads = threads,
            .planning = planning,
            .listeners = listeners,
            .in_op = in_op,
            .is_side = true};
  }
  // Whether ops may use kernels for sm_90.
  bool may_use_sm90() const { return compute_capability == 90 && !portable_only; }
};

class Runtime {
 public:
  struct Options {
    Device device;
    int64_t arena_bytes = 0;  // the arena's size, scratch included
    int64_t scratch_bytes = 0;
    bool planning = false;
    bool side_streams = true;  // GPU only; false: all work runs in one stream's order
    KernelChoices kernels = {};
    bool strict = false;  // a fallback (routes.h) throws
  };
  explicit Runtime(const Options& options);
  ~Runtime();
  Runtime(const Runtime&) = delete;

  Context& ctx() { return ctx_; }
  Arena& arena() { return arena_; }
  Scratch& scratch() { return scratch_; }
  Stream& stream() { return stream_; }
  MemoryLog* memory_log() { return memory_log_.get(); }  // null on a planning runtime

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

// Copies all elements. Shapes and dtypes must be equal; either view may be strided and on any device. Queued on
// ctx.stream.
void copy(Context& ctx, Tensor dst, ConstTensor src);
// Sets all elements to 0; t may be strided. Queued on ctx.stream.
void zero(Context& ctx, Tensor t);
// Copies to or from host memory and synchronises ctx.stream; the tensor must be contiguous. Apart from tests and tools,
// read() is the only call by which a step may block the host.
void read(Context& ctx, void* host, ConstTensor contiguous_src);
void write(Context& ctx, Tensor contiguous_dst, const void* host);

}  // namespace triad
