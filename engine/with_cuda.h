// Whether this program has the code for GPUs.
#pragma once

namespace triad::backend {

bool built_with_cuda();

}  // namespace triad::backend
