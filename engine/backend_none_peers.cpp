// comm/peers.h in a build without CUDA.
#include "engine/check.h"
#include "engine/comm/peers.h"

namespace triad::backend {

bool can_access_peer(int, int) { return false; }
void enable_peer_access(int from, int to) { fail("no CUDA: GPUs {} and {} cannot reach each other", from, to); }

}  // namespace triad::backend
