// Lists by a taught index against their definition, score by score. Queries and keys are small integers, so that
// scores are exact in any dtype and many are equal.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/rng.h"
#include "kernels/nsa/document_tables.h"
#include "kernels/nsa/select_index.h"
#include "tests/support/nsa_problem.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr int64_t kRows = 2, kTokens = 83, kGroups = 2, kWidth = 4;

struct Case {
  SelectOptions o;
  std::vector<int32_t> bounds;  // of documents, in both rows
};

Values integers(int64_t n, uint64_t stream) {
  Values out(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    out[static_cast<size_t>(i)] = static_cast<double>(Philox(3, stream).block(static_cast<uint64_t>(i))[0] % 7) - 3;
  return out;
}

// The list of token t of a document in which q is t's query and k [..,kWidth] the keys; block numbers from `first` on.
Values list_of(const double* q, const double* k, int64_t t, int64_t first, const SelectOptions& o) {
  const int64_t current = t / o.l_sel;
  std::vector<int64_t> listed, candidates;
  std::vector<double> scores(static_cast<size_t>(current + 1), -1e9);
  for (int64_t j = 0; j <= current; ++j) {
    for (int64_t s = j * o.l_sel; s < (j + 1) * o.l_sel && s <= t; ++s) {
      double score = 0;
      for (int64_t i = 0; i < kWidth; ++i) score += q[i] * k[s * kWidth + i];
      scores[static_cast<size_t>(j)] = std::max(scores[static_cast<size_t>(j)], score);
    }
    if (j < o.init_blocks || j > current - o.local_blocks)
      listed.push_back(j);
    else if ((j + 1) * o.l_sel <= t + 1)
      candidates.push_back(j);
  }
  std::stable_sort(candidates.begin(), candidates.end(), [&](int64_t a, int64_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  const size_t free = static_cast<size_t>(o.n_sel) - listed.size();
  for (size_t i = 0; i < std::min(free, candidates.size()); ++i) listed.push_back(candidates[i]);
  std::sort(listed.begin(), listed.end());
  Values list(static_cast<size_t>(o.n_sel), -1);
  for (size_t i = 0; i < listed.size(); ++i) list[i] = static_cast<double>(first + listed[i]);
  return list;
}

}  // namespace

TEST_CASE("a taught index: each list has the blocks whose best token scores highest", "[nsa]") {
  std::vector<Setting> settings = {{Device::cpu(), DType::f64}, {Device::cpu(), DType::f32}};
  if (backend::cuda_device_count() > 0) settings.push_back({Device::cuda(), DType::bf16});
  for (const Setting& setting : settings)
    for (const Case& c : {Case{{{}, 4, 5, 1, 2}, {0, kTokens}}, Case{{{}, 8, 3, 0, 1}, {0, kTokens}},
                          Case{{{}, 3, 6, 2, 1}, {0, 9, 10, 50, kTokens}}, Case{{{}, 5, 3, 1, 1}, {0, 31, kTokens}},
                          Case{{{}, 4, 5, 1, 2, 2}, {0, kTokens}}, Case{{{}, 8, 3, 0, 1, 8}, {0, kTokens}},
                          Case{{{}, 6, 4, 1, 1, 3}, {0, 9, 10, 50, kTokens}}}) {
      if (setting.device.is_cuda() && c.o.every > 1) continue;
      INFO("one list for " << c.o.every << " tokens");
      INFO("l' " << c.o.l_sel << ", n " << c.o.n_sel << ", " << c.bounds.size() - 1 << " documents");
      Lab lab(setting);
      const Values q = integers(kRows * kTokens * kGroups * kWidth, 1), k = integers(kRows * kTokens * kWidth, 2);
      const auto table = [&](int64_t entries) { return lab.poisoned({kRows, entries}, DType::i32); };
      const int64_t most = static_cast<int64_t>(c.bounds.size()) - 1;
      const DocumentTables tables{table(kTokens), table(kTokens), table(kTokens),
                                  table(block_ids(kTokens, c.o.l_sel, most))};
      Values bounds = {0};
      for (int64_t b = 0; b < kRows; ++b)
        for (size_t d = 1; d < c.bounds.size(); ++d) bounds.push_back(static_cast<double>(b * kTokens + c.bounds[d]));
      nsa_document_tables(lab.ctx(), tables, lab.from(bounds, {kRows * most + 1}, DType::i32), c.o.l_sel);
      const Tensor lists = lab.poisoned({kRows, kTokens, kGroups, c.o.n_sel}, DType::i32);
      nsa_select_index(lab.ctx(), lists, lab.from(q, {kRows, kTokens, kGroups, kWidth}, setting.dtype),
                       lab.from(k, {kRows, kTokens, 1, kWidth}, setting.dtype), c.o, tables);
      Values expected;
      for (int64_t b = 0; b < kRows; ++b) {
        for (size_t d = 1; d < c.bounds.size(); ++d) {
          const int64_t begin = c.bounds[d - 1], end = c.bounds[d];
          const int64_t first_block = begin / c.o.l_sel + static_cast<int64_t>(d) - 1;
          for (int64_t t = begin; t < end; ++t)
            for (int64_t g = 0; g < kGroups; ++g) {
              const int64_t first = t - (t - begin) % c.o.every;  // of those that share t's list
              const Values list = list_of(q.data() + ((b * kTokens + first) * kGroups + g) * kWidth,
                                          k.data() + (b * kTokens + begin) * kWidth, first - begin, first_block, c.o);
              expected.insert(expected.end(), list.begin(), list.end());
            }
        }
      }
      CHECK(lab.values(lists) == expected);
    }
}
