// ForkJoin: side work starts after the work queued before it, and join() waits for the side work. Copies that take many
// milliseconds delay the earlier work, so a missing wait would give zero.
#include "engine/fork_join.h"

#include <algorithm>
#include <vector>

#include "tests/support/test.h"

namespace {

using namespace triad;

TEST_CASE("engine: side work starts after the work queued before it, and join waits for it (GPU)", "[engine][gpu]") {
  if (!test::require_gpu()) return;
  Runtime rt({.device = Device::cuda(), .arena_bytes = int64_t{5} << 28, .scratch_bytes = int64_t{1} << 20});
  Context& ctx = rt.ctx();
  const auto alloc = [&](int64_t n) { return rt.arena().alloc(MemTag::io, "test", DType::f32, {n}); };
  const int64_t n = 1000, large = int64_t{1} << 26;
  const Tensor from = alloc(large), to = alloc(large), side_from = alloc(large), side_to = alloc(large);
  const Tensor ones = alloc(n), x = alloc(n), y = alloc(n), z = alloc(n), out = alloc(n);
  const auto delay = [](Context& on, const Tensor& dst, const Tensor& src) {
    for (int i = 0; i < 40; ++i) copy(on, dst, src);  // each copies 256 MiB
  };
  write(ctx, ones, std::vector<float>(static_cast<size_t>(n), 1.0f).data());
  for (int number = 0; number < 3; ++number)
    for (int round = 0; round < 2; ++round) {  // the second round uses the same side stream again
      INFO("side stream " << number << ", round " << round);
      for (const Tensor& t : {x, y, z, out, from, side_from}) zero(ctx, t);
      ctx.stream.synchronize();
      delay(ctx, to, from);
      copy(ctx, x, ones);
      ForkJoin side_work(ctx, number, [&](Context& side) {
        copy(side, y, x);
        delay(side, side_to, side_from);
        copy(side, z, y);
      });
      side_work.join();
      copy(ctx, out, z);
      std::vector<float> got(static_cast<size_t>(n));
      read(ctx, got.data(), out);
      CHECK(std::all_of(got.begin(), got.end(), [](float v) { return v == 1.0f; }));
      rt.stream().synchronize();
    }
}

}  // namespace
