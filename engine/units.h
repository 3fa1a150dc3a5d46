// Units of memory.
#pragma once

namespace triad {

inline constexpr double kMiB = 1024.0 * 1024.0;  // bytes

}  // namespace triad
