// Direct access between two GPU memories on this host: engine/backend_cuda_peers.cpp or engine/backend_none_peers.cpp.
#pragma once

namespace triad::backend {

bool can_access_peer(int from, int to);  // arguments: GPU indices; false without CUDA
// Makes later copies between the two GPUs direct instead of through the host. Call it once per pair, and only if
// can_access_peer() is true.
void enable_peer_access(int from, int to);

}  // namespace triad::backend
