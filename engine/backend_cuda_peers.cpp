// comm/peers.h over the CUDA runtime.
#include <initializer_list>
#include <utility>

#include "engine/comm/peers.h"
#include "engine/cuda_check.h"

namespace triad::backend {

bool can_access_peer(int from, int to) {
  int can = 0;
  CUDA_CHECK(cudaDeviceCanAccessPeer(&can, from, to));
  return can != 0;
}

void enable_peer_access(int from, int to) {
  for (const auto& [one, other] : {std::pair(from, to), std::pair(to, from)}) {
    CUDA_CHECK(cudaSetDevice(one));
    CUDA_CHECK(cudaDeviceEnablePeerAccess(other, 0));
  }
}

}  // namespace triad::backend
