// OpCases for cards with little shared memory, which a larger card runs as well.
#pragma once
#include <utility>

#include "kernels/common/op_case.h"
#include "kernels/common/route.h"

namespace triad {

// The same case on the portable kernels, which choose their tiles as on a card of compute capability 8.6, with 99 KiB
// of shared memory per CTA. Only the GPU runs it: on the CPU it is the same as the other case.
inline OpCase small_card_case(OpCase c) {
  using Run = std::function<void(Context&, const Args&)>;
  const auto on_small_card = [](Run run) -> Run {
    if (!run) return nullptr;
    return [run = std::move(run)](Context& ctx, const Args& a) {
      Context card = portable_context(ctx);
      card.compute_capability = 86;
      run(card, a);
    };
  };
  c.name += "_small_card";
  c.forward = on_small_card(std::move(c.forward)), c.backward = on_small_card(std::move(c.backward));
  c.cpu = c.differences = false;
  return c;
}

}  // namespace triad
