// KernelTrace: records a GPU's kernels, copies and fills, libraries' included, each with its times and the op that
// queued it (OpScope). A build with CUPTI compiles kernel_trace_cupti.cpp; one without compiles kernel_trace_none.cpp,
// whose constructor throws an Error.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/op_scope.h"

namespace triad {

struct Activity {
  std::string kernel;  // the kernel's demangled name without arguments, or "copy", or "fill"
  std::string op;      // op that queued it; empty: queued outside any op
  int64_t begin_ns = 0, end_ns = 0;
  int64_t stream = 0;  // CUPTI's stream number
};

class KernelTrace {
 public:
  explicit KernelTrace(Context&);  // starts recording; throws an Error without a GPU or CUPTI
  ~KernelTrace();
  KernelTrace(const KernelTrace&) = delete;
  // Waits for the context's stream and ends the trace. Returns the records, sorted by begin_ns.
  std::vector<Activity> finish();

 private:
  class Recorder;
  Context& ctx_;
  std::unique_ptr<Recorder> recorder_;
};

}  // namespace triad
