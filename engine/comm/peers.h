// Whether GPUs of this host reach each other's memory without the host. backend_cuda_peers.cpp or
// backend_none_peers.cpp.
#pragma once

namespace triad::backend {

bool can_access_peer(int from, int to);  // GPUs by index; without CUDA: false
// From here on copies between the two go straight, not through the host. Once for a pair; only where they can.
void enable_peer_access(int from, int to);

}  // namespace triad::backend
