// What selection lists hold of dense attention in sampled rows: each class of distances against the softmax written out
// in f64, on packed rows too, and lists of all blocks, which hold everything.
#include <bit>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "kernels/nsa/document_tables.h"
#include "kernels/nsa/list_recall.h"
#include "tests/support/nsa_problem.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

struct Case {
  int64_t T, groups, heads, dk, l_sel, n;
  std::vector<int32_t> bounds;  // document bounds, the same in both sequences
  bool all = false;             // lists have all blocks
};
constexpr int64_t kSequences = 2;

// Which document a token belongs to, its first token, and the id of its first block.
struct Place {
  int64_t begin, first_block;
};
Place place_of(const Case& c, int64_t t) {
  size_t i = 0;
  while (c.bounds[i + 1] <= t) ++i;
  return {c.bounds[i], c.bounds[i] / c.l_sel + static_cast<int64_t>(i)};
}

Values lists_of(const Case& c) {
  Values lists;
  for (int64_t row = 0; row < kSequences * c.T * c.groups; ++row) {
    const int64_t t = row / c.groups % c.T;
    const Place place = place_of(c, t);
    std::vector<double> list;
    for (int64_t block = 0; block <= (t - place.begin) / c.l_sel; ++block)
      if (static_cast<int64_t>(list.size()) < c.n && (c.all || (row * 7 + block * 5) % 3 == 0))
        list.push_back(static_cast<double>(place.first_block + block));
    list.resize(static_cast<size_t>(c.n), -1);
    lists.insert(lists.end(), list.begin(), list.end());
  }
  return lists;
}

void check(const Setting& setting, const Case& c) {
  INFO(setting.device.str() << " " << name_of(setting.dtype) << ", T " << c.T << ", dk " << c.dk << ", "
                            << c.bounds.size() - 1 << " documents");
  Lab lab(setting);
  // q and k are columns of wider rows, as in a layer.
  const int64_t width = (c.heads + c.groups) * c.dk;
  const Tensor qk = lab.from(random_values(kSequences * c.T * width, 1), {kSequences, c.T, width}, setting.dtype);
  const Tensor q = qk.slice(2, 0, c.heads * c.dk).view({kSequences, c.T, c.heads, c.dk}),
               k = qk.slice(2, c.heads * c.dk, width).view({kSequences, c.T, c.groups, c.dk});
  const Values values = lab.values(qk), lists = lists_of(c);
  const auto most = static_cast<int64_t>(c.bounds.size()) - 1;
  DocumentTables tables;
  if (most > 1) {
    const auto table = [&](int64_t n) { return lab.poisoned({kSequences, n}, DType::i32); };
    tables = {table(c.T), table(c.T), table(c.T), table(block_ids(c.T, c.l_sel, most))};
    Values bounds = {0};
    for (int64_t b = 0; b < kSequences; ++b)
      for (size_t d = 1; d < c.bounds.size(); ++d) bounds.push_back(static_cast<double>(b * c.T + c.bounds[d]));
    nsa_document_tables(lab.ctx(), tables, lab.from(bounds, {kSequences * most + 1}, DType::i32), c.l_sel);
  }
  Values rows;
  for (int64_t row = 0; row < kSequences * c.T; row += 1 + c.T / 9) rows.push_back(static_cast<double>(row));
  rows.push_back(static_cast<double>(kSequences * c.T - 1));
  const auto R = static_cast<int64_t>(rows.size());
  const ListRecall out{lab.poisoned({R, c.heads, 2, kDistanceClasses}, acc_dtype(setting.dtype)),
                       lab.poisoned({R, c.heads}, acc_dtype(setting.dtype))};
  nsa_list_recall(lab.ctx(), out, lab.from(rows, {R}, DType::i32), q, k,
                  lab.from(lists, {kSequences, c.T, c.groups, c.n}, DType::i32), c.l_sel, tables);
  const Values mass = lab.values(out.mass), logits = lab.values(out.max_logit);
  const double tolerance = setting.dtype == DType::f64 ? 1e-12 : 2e-5;
  for (size_t i = 0; i < logits.size(); ++i) {
    const auto row = static_cast<int64_t>(rows[i / static_cast<size_t>(c.heads)]), t = row % c.T, first = row - t;
    const int64_t h = static_cast<int64_t>(i) % c.heads, g = h * c.groups / c.heads;
    INFO("row " << row << ", head " << h);
    const Place place = place_of(c, t);
    const double* const list = lists.data() + (row * c.groups + g) * c.n;
    const std::set<double> listed(list, list + c.n);
    std::vector<double> p;  // one per key, the document's first one first
    double largest = -INFINITY, sum = 0;
    for (int64_t s = place.begin; s <= t; ++s) {
      double logit = 0;
      for (int64_t j = 0; j < c.dk; ++j)
        logit += values[static_cast<size_t>(row * width + h * c.dk + j)] *
                 values[static_cast<size_t>((first + s) * width + (c.heads + g) * c.dk + j)];
      p.push_back(logit / std::sqrt(static_cast<double>(c.dk)));
      largest = std::max(largest, p.back());
    }
    for (double& x : p) sum += x = std::exp(x - largest);
    Values expected(2 * kDistanceClasses, 0);
    for (size_t s = 0; s < p.size(); ++s) {
      const size_t distance_class = std::bit_width(p.size() - 1 - s);
      const int64_t block = place.first_block + static_cast<int64_t>(s) / c.l_sel;
      expected[distance_class] += p[s] / sum;
      if (listed.count(static_cast<double>(block))) expected[kDistanceClasses + distance_class] += p[s] / sum;
    }
    const double* const got = mass.data() + i * expected.size();
    CHECK(logits[i] == Approx(largest).epsilon(tolerance).margin(tolerance));
    for (size_t j = 0; j < expected.size(); ++j)
      CHECK(got[j] == Approx(expected[j]).epsilon(tolerance).margin(tolerance));
    for (size_t j = 0; j < kDistanceClasses && c.all; ++j) CHECK(got[j] == got[kDistanceClasses + j]);
  }
}

const std::vector<Case> kCases = {{1, 1, 1, 2, 4, 1, {0, 1}},
                                  {45, 2, 6, 6, 4, 5, {0, 45}},
                                  {83, 2, 4, 16, 8, 3, {0, 9, 10, 50, 83}},
                                  {83, 1, 4, 64, 5, 20, {0, 31, 83}, true},
                                  {1500, 2, 4, 64, 64, 7, {0, 1500}},
                                  {1500, 1, 2, 128, 32, 48, {0, 1500}, true}};

}  // namespace

TEST_CASE("list recall: masses by distance and largest logits follow their definition", "[nsa]") {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
    for (const Case& c : kCases) check({Device::cpu(), dtype}, c);
}

TEST_CASE("list recall: masses by distance and largest logits follow their definition on the GPU", "[nsa][gpu]") {
  on_gpu([](const Setting& setting) {
    for (const Case& c : kCases) check(setting, c);
  });
}
