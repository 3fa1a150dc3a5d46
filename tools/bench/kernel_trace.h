// What a GPU did while a trace ran: every kernel, copy and fill with its times, and the op that queued it (OpScope), a
// library's kernels too. By CUPTI's activity records: kernel_trace_cupti.cpp in a build that found it, else
// kernel_trace_none.cpp, in which asking for a trace is an error that says so.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/op_scope.h"

namespace triad {

struct Activity {
  std::string kernel;  // demangled, without its arguments; "copy", "fill"
  std::string op;      // empty: none
  int64_t begin_ns = 0, end_ns = 0;
  int64_t stream = 0;  // by CUPTI's number
};

class KernelTrace {
 public:
  explicit KernelTrace(Context&);  // begins; throws an Error where there is no CUPTI
  ~KernelTrace();
  KernelTrace(const KernelTrace&) = delete;
  // Waits for the context's stream and ends the trace. In the order of their beginning.
  std::vector<Activity> finish();

 private:
  class Recorder;
  Context& ctx_;
  std::unique_ptr<Recorder> recorder_;
};

}  // namespace triad
