// The attended pairs and FLOPs in closed form, against counting every pair; rows with several documents.
#include "model/flops.h"

#include <algorithm>
#include <vector>

#include "model/attention.h"
#include "tests/support/model_fixture.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// Counts pairs for documents with these lengths, query by query and key by key.
AttendedPairs counted(const ModelConfig& c, const std::vector<int64_t>& lengths) {
  const NsaConfig& n = c.nsa;
  AttendedPairs pairs;
  for (const int64_t length : lengths)
    for (int64_t t = 0; t < length; ++t) {
      const int64_t own = t / n.l_sel, first_listed = std::max<int64_t>(0, own - n.n_sel + 1);
      for (int64_t key = 0; key <= t; ++key) {
        pairs.dense += 1;
        pairs.win += t - key < n.w;
        pairs.sel += key / n.l_sel >= first_listed;         // any n_sel blocks up to the query's own have as many keys
        pairs.cmp += key % n.d == 0 && key + n.l - 1 <= t;  // compressed block that begins at the key
      }
    }
  return pairs;
}

ModelConfig config_of(int64_t l, int64_t d, int64_t l_sel, int64_t n_sel, int64_t w) {
  ModelConfig c = small_model();
  c.nsa.l = l, c.nsa.d = d, c.nsa.l_sel = l_sel, c.nsa.n_sel = n_sel, c.nsa.w = w;
  c.resolve();
  return c;
}

void check_equal(const AttendedPairs& a, const AttendedPairs& b) {
  CHECK(a.cmp == Approx(b.cmp).epsilon(1e-12));
  CHECK(a.sel == Approx(b.sel).epsilon(1e-12));
  CHECK(a.win == Approx(b.win).epsilon(1e-12));
}

}  // namespace

TEST_CASE("flops: the attended pairs are those that are counted one by one", "[model][documents]") {
  for (const ModelConfig& c : {config_of(8, 4, 8, 4, 11), config_of(32, 16, 64, 6, 60), config_of(4, 4, 4, 3, 1000)})
    for (const int64_t T : {1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 200, 449}) {
      INFO("l " << c.nsa.l << ", T " << T);
      const AttendedPairs all = counted(c, {T});
      check_equal(attended_pairs(c, AttentionKind::nsa, T), all);
      CHECK(attended_pairs(c, AttentionKind::dense, T).dense == all.dense);
    }
}

TEST_CASE("flops: tokens that share a list select once", "[model]") {
  const ModelConfig c = config_of(8, 4, 8, 4, 11);
  ModelConfig shared = c;
  shared.nsa.every = 4;
  shared.resolve();
  const AttendedPairs pairs = attended_pairs(c, AttentionKind::nsa, 200);
  const double selection = 2 * pairs.cmp * static_cast<double>(c.d_k * c.n_heads * c.n_layers);
  CHECK(training_flops(c, 1, 200) - training_flops(shared, 1, 200) == Approx(0.75 * selection));
}

TEST_CASE("flops: rows of documents have the pairs of their documents", "[model][documents]") {
  // Three rows, 200 tokens each.
  const std::vector<std::vector<int64_t>> rows = {{200}, {1, 2, 7, 90, 100}, {50, 50, 50, 50}};
  DocumentMix mix{.rows = 3, .documents = {}};
  for (const std::vector<int64_t>& row : rows)
    for (const int64_t length : row) mix.add(length);
  CHECK(mix.documents.at(50) == 4);
  for (const ModelConfig& c : {config_of(8, 4, 8, 4, 11), config_of(32, 16, 64, 6, 60)}) {
    AttendedPairs want;
    for (const std::vector<int64_t>& row : rows) {
      const AttendedPairs row_pairs = counted(c, row);
      want.cmp += row_pairs.cmp / 3, want.sel += row_pairs.sel / 3, want.win += row_pairs.win / 3,
          want.dense += row_pairs.dense / 3;
    }
    check_equal(attended_pairs(c, AttentionKind::nsa, 200, mix), want);
    CHECK(attended_pairs(c, AttentionKind::dense, 200, mix).dense == Approx(want.dense));
    // FLOPs: products with weights as without documents; for each pair, one dk-long and one dv-long product in forward,
    // three and two in backward; for each compressed pair one dk-long product for the selection's scores.
    const int64_t B = 5;
    const double dk = static_cast<double>(c.d_k), dv = static_cast<double>(c.d_v);
    const ProductFlops products = product_flops(c, B, 200);
    const double attention = 2 * (want.cmp + want.sel + want.win) * (4 * dk + 3 * dv) + 2 * want.cmp * dk;
    const double heads = static_cast<double>(B * c.n_heads * c.n_layers);
    CHECK(training_flops(c, B, 200, {}, mix) == Approx(products.layers + products.head + heads * attention));
    CHECK(training_flops(c, B, 200, {}, mix) < training_flops(c, B, 200));
    CHECK(training_flops(c, B, 200, {}, {.rows = 7, .documents = {{200, 7}}}) == Approx(training_flops(c, B, 200)));
    // Recomputation repeats the documents' attention.
    const double replayed = 2.0 * static_cast<double>(B * 200 * c.dim * qkv_width(c, AttentionKind::nsa)) +
                            2 * (want.cmp + want.sel + want.win) * static_cast<double>(B * c.n_heads) * (dk + dv);
    RecomputePlan one_layer;  // the last layer (of two) keeps forward's values
    one_layer.set(0, 2, Recompute::attention);
    CHECK(replay_flops(c, B, 200, one_layer, mix) == Approx(replayed));
  }
}
