// Events that a graph waits for or records, and that are recorded again while the graph is still queued: the host may
// be one step ahead of the device. Slow copies delay the work before and after an event, so that waiting for the
// event's wrong record gives a wrong result.
#include "engine/graph.h"

#include <algorithm>
#include <vector>

#include "tests/support/test.h"

namespace {

using namespace triad;

struct Queues {
  Runtime rt{{.device = Device::cuda(), .arena_bytes = int64_t{5} << 28, .scratch_bytes = int64_t{1} << 20}};
  Stream other{Device::cuda(), "other"};
  Context& ctx = rt.ctx();
  Context side_ctx = ctx.on(other, ctx.scratch);
  Tensor from = alloc(int64_t{1} << 26), to = alloc(from.numel()), side_from = alloc(from.numel()),
         side_to = alloc(from.numel());
  Tensor ones = alloc(1000), twos = alloc(1000), x = alloc(1000), in = alloc(1000), out = alloc(1000);
  GraphEvent event{Device::cuda()};
  Graph graph{Device::cuda()};

  Queues() {
    for (const auto& [t, value] : {std::pair(ones, 1.0f), std::pair(twos, 2.0f)})
      write(ctx, t, std::vector<float>(1000, value).data());
    for (const Tensor& t : {from, side_from}) zero(ctx, t);
  }
  Tensor alloc(int64_t n) { return rt.arena().alloc(MemTag::io, "test", DType::f32, {n}); }
  static void delay(Context& on, const Tensor& dst, const Tensor& src) {
    for (int i = 0; i < 400; ++i) copy(on, dst, src);  // each copies 256 MiB, which takes far longer than a launch
  }
  void clear() {
    for (const Tensor& t : {x, out}) zero(ctx, t);
    ctx.stream.synchronize();
  }
  bool all_of_out(float value) {
    std::vector<float> got(1000);
    other.synchronize();
    read(ctx, got.data(), out);
    return std::all_of(got.begin(), got.end(), [&](float v) { return v == value; });
  }
};

TEST_CASE("engine: a queued graph waits for the record of its event at the time of the launch (GPU)", "[engine][gpu]") {
  if (!test::require_gpu()) return;
  Queues q;
  copy(q.ctx, q.out, q.x);
  q.graph.record(q.ctx, [&] {
    q.event.block(q.ctx.stream);
    copy(q.ctx, q.out, q.x);
  });
  for (int round = 0; round < 3; ++round) {
    INFO("round " << round);
    q.clear();
    q.delay(q.side_ctx, q.side_to, q.side_from);
    copy(q.side_ctx, q.x, q.ones);
    q.event.record(q.other);
    q.graph.launch(q.ctx.stream);
    q.delay(q.side_ctx, q.side_to, q.side_from);
    copy(q.side_ctx, q.x, q.twos);
    q.event.record(q.other);  // the next step's event, recorded while the graph still waits
    CHECK(q.all_of_out(1));
  }
}

TEST_CASE("engine: a wait for a graph's event waits for the launch before it, not for a later one (GPU)",
          "[engine][gpu]") {
  if (!test::require_gpu()) return;
  Queues q;
  copy(q.ctx, q.x, q.in);
  q.graph.record(q.ctx, [&] {
    q.delay(q.ctx, q.to, q.from);
    copy(q.ctx, q.x, q.in);
    q.event.record(q.ctx.stream);
    q.delay(q.ctx, q.to, q.from);
  });
  for (int round = 0; round < 3; ++round) {
    INFO("round " << round);
    q.clear();
    copy(q.ctx, q.in, q.ones);
    q.graph.launch(q.ctx.stream);
    q.event.block(q.other);
    copy(q.side_ctx, q.out, q.x);
    copy(q.ctx, q.in, q.twos);
    q.graph.launch(q.ctx.stream);  // records the event again
    CHECK(q.all_of_out(1));
  }
}

}  // namespace
