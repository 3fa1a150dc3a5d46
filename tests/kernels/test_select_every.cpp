// Lists that tokens share (SelectOptions::every): those of the first of every R tokens, as the selection without
// sharing makes them; in decoding, those of the last step until the next of these tokens.
#include <algorithm>

#include "kernels/decode/decode.h"
#include "kernels/nsa/select_index.h"
#include "tests/support/nsa_problem.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr int64_t kB = 2, kT = 83, kHeads = 4, kGroups = 2, kWidth = 8;
const Setting kCpu64{Device::cpu(), DType::f64};

SelectOptions options(int64_t every) {
  SelectOptions o;
  o.l = 8, o.d = 4, o.l_sel = 8, o.n_sel = 4, o.every = every;
  return o;
}

// Inputs of the selection by the compressed branch, and of that by an index.
struct Inputs {
  Lab lab{kCpu64};
  int64_t blocks = compressed_length(kT, 8, 4);
  Tensor q = random({kB, kT, kHeads, kWidth}, 1), k_cmp = random({kB, blocks, kGroups, kWidth}, 2),
         lse = random({kB, kT, kHeads}, 3), iq = random({kB, kT, kGroups, kWidth}, 4),
         ik = random({kB, kT, 1, kWidth}, 5);

  Tensor random(const Shape& shape, uint64_t stream) {
    return lab.from(random_values(shape.numel(), stream), shape, DType::f64);
  }
  Values lists(bool index, const SelectOptions& o) {
    const Tensor to = lab.poisoned({kB, kT, kGroups, o.n_sel}, DType::i32);
    if (index)
      nsa_select_index(lab.ctx(), to, iq, ik, o);
    else
      nsa_select(lab.ctx(), to, q, k_cmp, lse, o);
    return lab.values(to);
  }
};

}  // namespace

TEST_CASE("lists that tokens share are those of the first of them", "[nsa]") {
  Inputs in;
  for (const bool index : {false, true}) {
    const Values each = in.lists(index, options(1));
    for (const int64_t every : {2, 4, 8}) {
      INFO((index ? "index" : "compressed") << ", one list for " << every << " tokens");
      const Values shared = in.lists(index, options(every));
      const int64_t row = kGroups * options(1).n_sel;
      int64_t differ = 0;
      for (int64_t b = 0; b < kB; ++b)
        for (int64_t t = 0; t < kT; ++t) {
          const auto of = [&](const Values& from, int64_t at) {
            const auto begin = from.begin() + (b * kT + at) * row;
            return Values(begin, begin + row);
          };
          REQUIRE(of(shared, t) == of(each, t - t % every));
          differ += of(each, t) != of(each, t - t % every);
          const Values list = of(shared, t);  // the token's own block is in it, and none after that
          REQUIRE(*std::max_element(list.begin(), list.begin() + options(1).n_sel) == static_cast<double>(t / 8));
        }
      CHECK(differ > 10);
    }
  }
}

TEST_CASE("lists that tokens share hold in decoding until the next of their first tokens", "[nsa][decode]") {
  Inputs in;
  Context& ctx = in.lab.ctx();
  const SelectOptions o = options(4);
  const Values all = in.lists(/*index=*/true, o);
  const Tensor lists = in.lab.poisoned({kB, 1, kGroups, o.n_sel}, DType::i32);
  const size_t row = static_cast<size_t>(kGroups * o.n_sel);
  for (int64_t t = 0; t < kT; ++t) {
    const Tensor position = in.lab.from(Values(kB, static_cast<double>(t)), {kB}, DType::i32);
    const Values iq = in.lab.values(in.iq);
    Values queries;
    for (int64_t b = 0; b < kB; ++b) {
      const auto begin = iq.begin() + (b * kT + t) * kGroups * kWidth;
      queries.insert(queries.end(), begin, begin + kGroups * kWidth);
    }
    index_decode(ctx, lists, in.lab.from(queries, {kB, 1, kGroups, kWidth}, DType::f64), in.ik, position, o);
    const Values got = in.lab.values(lists);
    for (size_t b = 0; b < kB; ++b) {
      const auto expected = all.begin() + static_cast<int64_t>((b * kT + static_cast<size_t>(t)) * row);
      REQUIRE(std::equal(expected, expected + static_cast<int64_t>(row), got.begin() + static_cast<int64_t>(b * row)));
    }
  }
}

TEST_CASE("lists that tokens share: what cannot be is refused", "[nsa]") {
  Inputs in;
  for (const bool index : {false, true}) {
    check_error([&] { in.lists(index, options(3)); }, {"lists for 3 tokens in blocks of 8"});
    check_error([&] { in.lists(index, options(-8)); }, {"lists for -8 tokens"});
    const SelectOptions o = options(4);
    Documents part;
    part.part = {.first_query = 6, .first_key = 0, .tokens = kT};
    const Tensor lists = in.lab.poisoned({kB, kT - 6, kGroups, o.n_sel}, DType::i32);
    check_error(
        [&] {
          if (index)
            nsa_select_index(in.lab.ctx(), lists, in.iq.slice(1, 6, kT), in.ik, o, part);
          else
            nsa_select(in.lab.ctx(), lists, in.q.slice(1, 6, kT), in.k_cmp, in.lse.slice(1, 6, kT), o, part);
        },
        {"4 tokens share a list", "begin at token 6"});
  }
}
