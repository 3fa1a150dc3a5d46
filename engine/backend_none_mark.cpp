// write_mark() (process/progress.h) without CUDA does nothing: work runs in the calling thread, so the host's position
// in Progress is also the device's position.
#include "engine/process/progress.h"

namespace triad::backend {

void write_mark(Device, void*, std::byte*, uint32_t) {}

}  // namespace triad::backend
