// Writes one step's work as a Chrome trace (for chrome://tracing or Perfetto). On a GPU the trace has the kernels and
// copies that CUPTI records, with one lane per stream; on a CPU it has ops, by the host's clock.
#pragma once
#include <functional>
#include <string>

#include "engine/context.h"

namespace triad {

// Calls queued_work() and returns a trace of what it queues on ctx, as JSON text. On a GPU, throws an Error in a build
// without CUPTI.
std::string chrome_trace(Context& ctx, const std::function<void()>& queued_work);

}  // namespace triad
