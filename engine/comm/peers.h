// Direct access between the memories of two GPUs of this host: backend_cuda_peers.cpp or backend_none_peers.cpp.
#pragma once

namespace triad::backend {

bool can_access_peer(int from, int to);  // from, to: GPU indices; false without CUDA
// Makes later copies between the two GPUs direct instead of through the host. Call once for a pair, if
// can_access_peer().
void enable_peer_access(int from, int to);

}  // namespace triad::backend
