// Writes one step's work as a Chrome trace (chrome://tracing, Perfetto). On a GPU: kernels and copies from CUPTI's
// records, one lane for each stream. On the CPU: ops by the host's clock.
#pragma once
#include <functional>
#include <string>

#include "engine/context.h"

namespace triad {

// Calls queued_work(), traces what it does on ctx, and returns the trace's JSON text. On a GPU it throws an Error in a
// build without CUPTI.
std::string chrome_trace(Context& ctx, const std::function<void()>& queued_work);

}  // namespace triad
