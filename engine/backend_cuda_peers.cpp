#include "engine/cuda_check.h"
#include "engine/peers.h"

namespace triad::backend {

bool can_access_peer(int from, int to) {
  int can = 0;
  CUDA_CHECK(cudaDeviceCanAccessPeer(&can, from, to));
  return can != 0;
}

}  // namespace triad::backend
