// Masters split into weights and remainders (train.master_dtype split). Each check runs on the CPU, and on the GPU if
// there is one.
#include <bit>
#include <utility>
#include <vector>

#include "kernels/update/adamw.h"
#include "kernels/update/muon.h"
#include "kernels/update/split_master.h"
#include "tests/support/device_lab.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// Split masters with n elements, whose tie bits begin inside a word.
struct Split {
  SplitMaster all;
  Split(Lab& lab, int64_t n)
      : all{lab.alloc(DType::u8, {n, 2}), lab.alloc(DType::bf16, {n}), {lab.alloc(DType::i32, {n / 32 + 2}), 8}} {}
  SplitMaster part(int64_t begin, int64_t end) const {
    return {all.remainder.slice(0, begin, end), all.weights.slice(0, begin, end), {all.ties.words, 8 + begin}};
  }
  std::vector<uint32_t> joined(Lab& lab) const {
    const Tensor master = lab.alloc(DType::f32, {all.weights.size(0)});
    join_master(lab.ctx(), master, all);
    return lab.values<uint32_t>(master);
  }
};

// Normal random numbers, every third moved halfway between two bf16 values.
Floats often_halfway(int64_t n, uint64_t stream) {
  Floats x = normal(n, stream);
  for (size_t i = 0; i < x.size(); ++i)
    if (i % 3 == 0) x[i] = std::bit_cast<float>((std::bit_cast<uint32_t>(x[i]) & 0xffff0000u) | 0x8000u);
  return x;
}

}  // namespace

TEST_CASE("split masters: every float that is no NaN survives, and its weight is its nearest bf16", "[state]") {
  // All lower halves under upper halves that are zero, subnormal, ordinary, the largest, infinite or NaN, with both
  // signs.
  std::vector<uint32_t> all;
  for (const uint32_t upper :
       {0x0000u, 0x0001u, 0x0002u, 0x007eu, 0x007fu, 0x0080u, 0x3f7fu, 0x3f80u, 0x7f7eu, 0x7f7fu, 0x7f80u, 0x7fc0u})
    for (const uint32_t sign : {0u, 0x8000u})
      for (uint32_t lower = 0; lower < 0x10000; ++lower) all.push_back((upper | sign) << 16 | lower);
  const auto n = static_cast<int64_t>(all.size());
  const auto is_nan = [](uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; };
  for (const Device device : devices()) {
    Lab lab(device);
    INFO(device.str());
    const Split split(lab, n);
    const Tensor master = lab.alloc(DType::f32, {n});
    write(lab.ctx(), master, all.data());
    split_master(lab.ctx(), split.all, master);
    const std::vector<uint32_t> joined = split.joined(lab);
    const std::vector<bf16> weights = lab.values<bf16>(split.all.weights);
    int64_t wrong = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      const bf16 nearest(std::bit_cast<float>(all[i]));
      wrong += is_nan(all[i]) ? !is_nan(joined[i]) : joined[i] != all[i] || weights[i].bits != nearest.bits;
    }
    CHECK(wrong == 0);
    // Masters split part by part get the same bits as all split together.
    const Split apart(lab, n);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{3, 11}, {0, 3}, {11, n}})
      split_master(lab.ctx(), apart.part(begin, end), master.slice(0, begin, end));
    CHECK(apart.joined(lab) == joined);
  }
}

TEST_CASE("split masters: AdamW and Muon give the bits that they give with fp32 masters", "[state]") {
  constexpr int64_t n = 2000;
  const Floats masters = often_halfway(n, 1);
  // Matrices at even and odd elements, one with several words of tie bits.
  const MuonPlan plan({{0, 30, 20}, {600, 33, 17}, {1161, 20, 30}});
  for (const Device device : devices()) {
    for (const DType moments : {DType::f32, DType::bf16})
      for (const int64_t cut : {int64_t{0}, int64_t{1024}, int64_t{1029}}) {
        Lab lab(device);
        INFO(device.str() << ", moments " << name_of(moments) << ", parts cut at " << cut);
        const Tensor param = lab.from(masters, DType::f32), weights = lab.from(masters, DType::bf16);
        const Split split(lab, n);
        split_master(lab.ctx(), split.all, param);
        const auto moment = [&](uint64_t stream) { return lab.from(Floats(n, 1e-3f * stream), moments); };
        const Tensor m[] = {moment(1), moment(1), moment(1)}, v[] = {moment(2), moment(2)};
        const auto rows = static_cast<int64_t>(plan.pieces().size());
        const Tensor pieces = lab.alloc(DType::i64, {rows, MuonPiece::kFields});
        write(lab.ctx(), pieces, plan.pieces().data());
        const Tensor updates = lab.from(normal(plan.batches()[0].elements, 5, 0.1), muon_dtype(lab.ctx()));
        for (int64_t step = 1; step <= 4; ++step) {
          const Tensor grad = lab.from(normal(n, static_cast<uint64_t>(6 + step)), DType::f32),
                       norm_squared = lab.doubles({4.0});
          AdamWOptions o = {.lr = 1e-3, .weight_decay = 0.1, .grad_clip = 1, .step = step, .seed = 77};
          if (step == 1) o.lr = 0, o.weight_decay = 0;  // masters halfway stay so
          for (const auto& [begin, end] : {std::pair{int64_t{0}, cut}, {cut, n}}) {
            const auto of = [&, b = begin, e = end](const Tensor& t) { return t.slice(0, b, e); };
            const SplitMaster part = split.part(begin, end);
            o.first_element = begin;
            adamw(lab.ctx(), of(param), of(weights), of(m[0]), of(v[0]), of(grad), norm_squared, o);
            adamw(lab.ctx(), part.remainder, part.weights, of(m[1]), of(v[1]), of(grad), norm_squared, o, part.ties);
          }
          MuonTensors t = {.param = param,
                           .weights = weights,
                           .m = m[2],
                           .grad = grad,
                           .grad_norm_squared = norm_squared,
                           .pieces = pieces};
          muon_apply(lab.ctx(), t, updates, {.lr = o.lr, .step = step});
          t.param = split.all.remainder, t.weights = split.all.weights, t.ties = split.all.ties;
          muon_apply(lab.ctx(), t, updates, {.lr = o.lr, .step = step});
          CHECK(split.joined(lab) == lab.values<uint32_t>(param));
          CHECK(lab.values<uint16_t>(split.all.weights) == lab.values<uint16_t>(weights));
        }
        CHECK(lab.floats(m[1]) == lab.floats(m[0]));
        CHECK(lab.floats(v[1]) == lab.floats(v[0]));
      }
  }
}

TEST_CASE("split masters: wrong shapes and too few tie bits are errors", "[state]") {
  Lab lab(Device::cpu());
  const Split split(lab, 64);
  const Tensor master = lab.alloc(DType::f32, {64});
  SplitMaster wrong = split.all;
  wrong.ties.first = 72;
  check_error([&] { split_master(lab.ctx(), wrong, master); }, {"split_master", "64 tie bits from bit 72 on"});
  wrong = split.all;
  wrong.remainder = split.all.remainder.slice(0, 0, 63);
  check_error([&] { join_master(lab.ctx(), master, wrong); }, {"[63,2]", "[64,2]"});
}
