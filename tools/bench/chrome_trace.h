// One step's work as a Chrome trace (chrome://tracing, Perfetto): on a GPU its kernels and copies, a lane for each
// stream, from CUPTI's records; on the CPU its ops by the host's clock.
#pragma once
#include <functional>
#include <string>

#include "engine/context.h"

namespace triad {

// What queued_work() does on ctx, as the JSON text of the file.
std::string chrome_trace(Context& ctx, const std::function<void()>& queued_work);

}  // namespace triad
