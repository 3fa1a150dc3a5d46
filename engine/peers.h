// Whether GPUs of this host reach each other's memory without the host. backend_cuda_peers.cpp or
// backend_none_peers.cpp.
#pragma once

namespace triad::backend {

bool can_access_peer(int from, int to);  // GPUs by index; without CUDA: false

}  // namespace triad::backend
