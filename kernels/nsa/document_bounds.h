// Checks packed rows' document bounds (cu_seqlens) before they are copied to the device.
#pragma once
#include <cstdint>
#include <span>

namespace triad {

// Throws a UsageError that names the row, unless `bounds` are document bounds in B rows of T tokens: ascending from 0
// to B*T, one at every multiple of T (no document crosses a row), at most `most` documents in a row.
void check_bounds(std::span<const int32_t> bounds, int64_t B, int64_t T, int64_t most);

}  // namespace triad
