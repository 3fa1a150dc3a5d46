// An SM's shared memory, by compute capability (CUDA Programming Guide, "Technical Specifications per Compute
// Capability"). Kernels whose tiles or buffers have several sizes choose by it, so that a choice depends on the card
// and the problem alone, and tests can make it without the card.
#pragma once
#include <algorithm>
#include <cstdint>

#include "engine/check.h"
#include "engine/context.h"

namespace triad {

struct SharedLimits {
  int64_t sm_bytes, cta_bytes;  // bytes per SM; most bytes per CTA, static and dynamic together
  // The bytes that each CTA can have if an SM holds `ctas`. CUDA reserves 1 KiB per CTA.
  constexpr int64_t bytes_per_cta(int64_t ctas) const { return std::min(cta_bytes, sm_bytes / ctas - 1024); }
};

// compute_capability: 90 for sm_90. An unknown card counts as one with the smallest limits.
constexpr SharedLimits shared_limits(int compute_capability) {
  constexpr int64_t kKiB = 1024;
  switch (compute_capability) {
    case 80:
    case 87:
      return {164 * kKiB, 163 * kKiB};
    case 90:
    case 100:
    case 103:
    case 110:
      return {228 * kKiB, 227 * kKiB};
    default:  // 8.6, 8.9, 12.0, 12.1
      return {100 * kKiB, 99 * kKiB};
  }
}
inline SharedLimits shared_limits(const Context& ctx) { return shared_limits(ctx.compute_capability); }

// Throws if the context's card cannot give a CTA `bytes` of shared memory. The format and its arguments say what needs
// them.
template <class... Args>
void check_shared(const Context& ctx, const char* kernel, int64_t bytes, fmt::format_string<Args...> what,
                  Args&&... args) {
  const int64_t limit = shared_limits(ctx).cta_bytes;
  if (bytes <= limit) return;
  fail("{}: {} need {} bytes of shared memory; a CTA has {} on a card of compute capability {}.{}", kernel,
       fmt::vformat(what, fmt::make_format_args(args...)), bytes, limit, ctx.compute_capability / 10,
       ctx.compute_capability % 10);
}

}  // namespace triad
