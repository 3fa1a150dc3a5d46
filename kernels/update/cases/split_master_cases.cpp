// Split master cases: masters are split and joined again, so the outputs are the weights and the masters themselves. In
// f32 and f64 there is nothing to split, and the outputs are copies.
#include <bit>
#include <string>
#include <utility>

#include "kernels/common/op_case.h"
#include "kernels/ops/cast.h"
#include "kernels/update/split_master.h"

namespace triad {

namespace {

// first: where in larger buffers the split masters begin.
OpCase split_master_case(std::string name, int64_t n, int64_t first) {
  OpCase c{.op = "split_master", .name = std::move(name)};
  // Every third master is halfway between two bf16 values.
  const auto value = [](int64_t i, uint64_t seed) {
    const auto bits = static_cast<uint32_t>(0x3d000000 + 40503 * (i + static_cast<int64_t>(seed % 97)));
    return static_cast<double>(std::bit_cast<float>(i % 3 == 0 ? (bits & 0xffff0000u) | 0x8000u : bits));
  };
  c.args = {{.name = "master0", .role = ArgRole::constant, .shape = {n}, .type = ArgType::acc, .fill = value},
            {.name = "weights", .role = ArgRole::output, .shape = {n}},
            {.name = "master", .role = ArgRole::output, .shape = {n}, .type = ArgType::acc}};
  c.forward = [=](Context& ctx, const Args& t) {
    if (t["weights"].dtype != DType::bf16) {
      copy(ctx, t["weights"], t["master0"]);
      return copy(ctx, t["master"], t["master0"]);
    }
    Scratch::Scope scope(ctx.scratch);
    const Tensor remainder = scope.alloc(DType::u8, {first + n, 2}), weights = scope.alloc(DType::bf16, {first + n});
    const TieBits ties = {scope.alloc(DType::i32, {TieBits::words_for(first + n)}), first};
    const SplitMaster part = {remainder.slice(0, first, first + n), weights.slice(0, first, first + n), ties};
    split_master(ctx, part, t["master0"]);
    copy(ctx, t["weights"], part.weights);
    join_master(ctx, t["master"], part);
  };
  const double elements = static_cast<double>(n);
  c.forward_bytes = (4 + 4 + 4 + 4 + 4) * elements;  // split 4 to 4, copy 2, join 4 to 4
  c.forward_written = (4 + 2 + 4) * elements;
  return c;
}

}  // namespace

std::vector<OpCase> split_master_cases() {
  return {split_master_case("1", 1, 0), split_master_case("1031", 1031, 0),
          split_master_case("517 from element 3 on", 517, 3), split_master_case("4096 from element 8 on", 4096, 8)};
}

}  // namespace triad
