// KernelTrace for a build without CUPTI: every use throws an Error.
#include "engine/check.h"
#include "tools/bench/kernel_trace.h"

namespace triad {

class KernelTrace::Recorder {};

KernelTrace::KernelTrace(Context& ctx) : ctx_(ctx) { fail("kernels cannot be traced: triad was built without CUPTI"); }
KernelTrace::~KernelTrace() = default;
std::vector<Activity> KernelTrace::finish() { return {}; }

}  // namespace triad
