// OpCases for the portable kernels, and for cards with little shared memory, which a larger card runs as well.
#pragma once
#include <utility>

#include "kernels/common/op_case.h"
#include "kernels/common/route.h"

namespace triad {

// The same case on the portable kernels. compute_capability: which card they choose tiles for; 0: the card that runs
// them. Only the GPU runs it: on the CPU it would equal the other case.
inline OpCase portable_case(OpCase c, int compute_capability = 0) {
  using Run = std::function<void(Context&, const Args&)>;
  const auto on_portable = [compute_capability](Run run) -> Run {
    if (!run) return nullptr;
    return [run = std::move(run), compute_capability](Context& ctx, const Args& a) {
      Context card = portable_context(ctx);
      if (compute_capability != 0) card.compute_capability = compute_capability;
      run(card, a);
    };
  };
  c.name += compute_capability == 0 ? "_portable" : "_small_card";
  c.forward = on_portable(std::move(c.forward)), c.backward = on_portable(std::move(c.backward));
  c.cpu = c.differences = false;
  return c;
}

// The same case on the portable kernels, with the tiles for compute capability 8.6, which has 99 KiB of shared memory
// per CTA.
inline OpCase small_card_case(OpCase c) { return portable_case(std::move(c), 86); }

}  // namespace triad
