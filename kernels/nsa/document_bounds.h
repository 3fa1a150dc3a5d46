// Checks the bounds of the documents of packed rows (cu_seqlens) before they are copied to the device.
#pragma once
#include <cstdint>
#include <span>

namespace triad {

// Throws a UsageError that names the row, unless `bounds` are the bounds of documents in B rows of T tokens: ascending
// from 0 to B*T, a bound at every multiple of T (no document crosses a row), at most `most` documents in a row.
void check_bounds(std::span<const int32_t> bounds, int64_t B, int64_t T, int64_t most);

}  // namespace triad
