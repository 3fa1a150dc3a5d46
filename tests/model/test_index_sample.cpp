// The sample of a taught index in a forward pass: recall and largest logits by layer against the model's own queries,
// keys and lists, written out in f64.
#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "model/index_sample.h"
#include "tests/support/model_fixture.h"
#include "tests/support/test.h"
#include "train/inference.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr int64_t kTokens = 45;
const std::vector<int32_t> kBounds = {0, 7, 8, 45, 52, 90};

struct Case {
  const char* name;
  Branches branches;
  bool norms = false, documents = false, dense = false;
  int64_t n_sel = 0;  // 0: the model's own
  const char* recompute = "none";
};
const Case kCases[] = {
    {"three branches", Branches::all},
    {"three branches, keys of dense passes", Branches::all, false, false, true},
    {"one softmax, norms, mixed layers, recomputed", Branches::selected, true, false, false, 0, "block"},
    {"one softmax, documents", Branches::selected, false, true},
    {"one softmax, all blocks in the lists", Branches::selected, true, true, true, 12}};

ModelConfig taught(const Case& c) {
  ModelConfig m = small_model();
  m.nsa.selector = Selector::index, m.nsa.d_index = 6, m.nsa.branches = c.branches;
  m.qk_norm = c.norms;
  if (c.norms) m.n_layers = 3, m.dense_layers = "1:2";
  if (c.n_sel > 0) m.nsa.n_sel = c.n_sel;
  m.resolve();
  return m;
}

// The recall of a layer in rows, which number the tokens of two sequences, from what the layer's forward left.
IndexRecall expected_recall(ModelFixture& f, const Case& c, int64_t layer, const std::vector<int32_t>& rows) {
  const ModelConfig& m = f.model().config();
  const LayerActivations& a = f.activations().layer(layer);
  const AttentionKind kind = m.attention_of(layer);
  const QkvViews views = attended_qkv(a, m, kind, 2, kTokens);
  const Tensor k_view = c.branches == Branches::selected ? views.k[0] : views.k[c.dense ? 2 : 1];
  const auto values = [&](const Tensor& view) {  // [token, head, width]
    std::vector<double> all;
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t h = 0; h < view.size(2); ++h)
          for (const double x : read_floats(f.ctx(), view[b][t][h])) all.push_back(x);
    return all;
  };
  const std::vector<double> q = values(views.q), k = values(k_view);
  const std::vector<int32_t> lists = f.lists(layer);
  IndexRecall r;
  r.layer = layer, r.max_logit = -INFINITY;
  std::map<int64_t, std::pair<double, double>> classes;  // smallest distance: p, and what lists hold
  for (const int32_t row : rows)
    for (int64_t h = 0; h < m.n_heads; ++h) {
      const int64_t g = h * m.n_kv_groups / m.n_heads;
      int64_t begin = row - row % kTokens, first = 0;  // the document's first token and block
      if (c.documents) {
        const auto next = std::upper_bound(kBounds.begin(), kBounds.end(), row);
        const int64_t document = next - kBounds.begin() - 1, in_row = document < 3 ? document : document - 3;
        begin = kBounds[static_cast<size_t>(document)];
        first = begin % kTokens / m.nsa.l_sel + in_row;
      }
      const int32_t* const list = lists.data() + (row * m.n_kv_groups + g) * m.nsa.n_sel;
      const std::set<int64_t> listed(list, list + m.nsa.n_sel);
      std::vector<double> p;
      for (int64_t s = begin; s <= row; ++s) {
        double logit = 0;
        for (int64_t j = 0; j < m.d_k; ++j)
          logit += q[static_cast<size_t>((row * m.n_heads + h) * m.d_k + j)] *
                   k[static_cast<size_t>((s * m.n_kv_groups + g) * m.d_k + j)];
        p.push_back(logit / std::sqrt(static_cast<double>(m.d_k)));
        r.max_logit = std::max(r.max_logit, p.back());
      }
      double sum = 0;
      for (double& x : p) sum += x = std::exp(x);
      for (size_t s = 0; s < p.size(); ++s) {
        const double share = p[s] / sum / static_cast<double>(m.n_heads) / static_cast<double>(rows.size());
        const bool holds = listed.count(first + static_cast<int64_t>(s) / m.nsa.l_sel) > 0;
        auto& [mass, held] = classes[static_cast<int64_t>(std::bit_floor(p.size() - 1 - s))];
        mass += share, held += holds ? share : 0;
        r.recall += holds ? share : 0;
      }
    }
  for (const auto& [begin, sums] : classes) r.distances.push_back({begin, sums.first, sums.second / sums.first});
  return r;
}

void check(Device device, DType dtype, double tolerance) {
  for (const Case& c : kCases) {
    INFO(c.name << ", " << device.str() << " " << name_of(dtype));
    const ModelConfig m = taught(c);
    ModelFixture f(m, 2, kTokens, device, dtype, 3, 0.3, RecomputePlan::parse(c.recompute, m.n_layers), {},
                   c.documents ? 3 : 0);
    if (c.documents) f.set_documents(kBounds);
    Runtime memory({.device = device, .arena_bytes = 8 << 20});
    IndexSample sample(memory.arena(), m, dtype);
    const auto near = [&](double x) { return Approx(x).epsilon(tolerance).margin(tolerance); };
    std::vector<double> recalls;
    for (const std::vector<int32_t>& rows : {std::vector<int32_t>{3, 7, 44, 45, 58, 71, 89}, {89}}) {
      sample.begin(f.ctx(), rows);
      std::vector<IndexRecall> expected;
      // With recomputation all layers share buffers, so that a layer's values are read right after its forward.
      f.model().forward(f.ctx(), f.activations(), nullptr, nullptr, [&](int64_t layer, LayerActivations&) {
        sample.add(f.ctx(), layer, f.activations(), c.dense);
        if (m.has_index(layer)) expected.push_back(expected_recall(f, c, layer, rows));
      });
      const std::vector<IndexRecall> got = sample.read(f.ctx());
      REQUIRE(got.size() == expected.size());
      for (size_t i = 0; i < got.size(); ++i) {
        INFO("layer " << got[i].layer << ", " << rows.size() << " rows");
        CHECK(got[i].layer == expected[i].layer);
        CHECK(got[i].recall == near(expected[i].recall));
        CHECK(got[i].max_logit == near(expected[i].max_logit));
        recalls.push_back(got[i].recall);
        REQUIRE(got[i].distances.size() == expected[i].distances.size());
        for (size_t d = 0; d < got[i].distances.size(); ++d) {
          CHECK(got[i].distances[d].begin == expected[i].distances[d].begin);
          CHECK(got[i].distances[d].mass == near(expected[i].distances[d].mass));
          CHECK(got[i].distances[d].recall == near(expected[i].distances[d].recall));
        }
        if (c.n_sel > 0) CHECK(got[i].recall == 1);
      }
    }
    // Unless the lists have room for all blocks, they leave something out.
    if (c.n_sel == 0) CHECK(*std::min_element(recalls.begin(), recalls.end()) < 0.95);
  }
}

}  // namespace

TEST_CASE("index sample: recall and largest logits are those of the layer's queries, keys and lists", "[model]") {
  check(Device::cpu(), DType::f64, 1e-10);
  check(Device::cpu(), DType::bf16, 2e-5);
}

TEST_CASE("index sample: recall and largest logits are those of the layer's queries, keys and lists on the GPU",
          "[model][gpu]") {
  if (!require_gpu()) return;
  check(Device::cuda(), DType::f32, 2e-5);
  check(Device::cuda(), DType::bf16, 2e-5);
}
