// The CPU's part of backend.h, which both backend_cuda.cpp and backend_none.cpp call.
#pragma once
#include "engine/backend.h"

namespace triad::backend::cpu {
DeviceInfo info();
int64_t bytes_in_use();
std::byte* allocate(int64_t bytes);
void deallocate(std::byte*) noexcept;
}  // namespace triad::backend::cpu
