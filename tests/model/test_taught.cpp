// Models with a taught index (nsa.selector index), with NSA's three branches or one softmax (nsa.branches sel): the
// index's gradients against differences of its loss, what its loss moves and what moves it, and the limits in which
// such a model is a dense one. The judge of ../shared/reference compares the same passes with PyTorch.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/model_fixture.h"
#include "tests/support/test.h"
#include "train/inference.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr int64_t kTokens = 45;
const std::vector<int32_t> kBounds = {0, 7, 8, 45};

ModelConfig taught(Branches branches, bool norms = false, const std::string& nope_layers = "") {
  ModelConfig c = small_model();
  c.nsa.selector = Selector::index, c.nsa.d_index = 6, c.nsa.branches = branches;
  c.qk_norm = c.qkv_bias = norms;
  c.nope_layers = nope_layers;
  if (norms) c.n_layers = 3, c.dense_layers = "1:2";
  c.resolve();
  return c;
}

struct Case {
  const char* name;
  ModelConfig config;
  bool dense = false, documents = false;
  const char* recompute = "none";
};
std::vector<Case> cases() {
  return {{"three branches", taught(Branches::all)},
          {"one softmax, norms, mixed layers", taught(Branches::selected, true)},
          {"one softmax, norms, a layer without rotation", taught(Branches::selected, true, "2:3")},
          {"one softmax, documents, block recomputed", taught(Branches::selected), false, true, "block"},
          {"three branches in a dense pass", taught(Branches::all, true), true},
          {"one softmax in a dense pass, documents, attention recomputed", taught(Branches::selected), true, true,
           "attention"}};
}

ModelFixture build(const Case& c) {
  ModelFixture f(c.config, 1, kTokens, Device::cpu(), DType::f64, 3, 0.3,
                 RecomputePlan::parse(c.recompute, c.config.n_layers), {}, c.documents ? 3 : 0);
  if (c.documents) f.set_documents(kBounds);
  f.model().attend_densely(c.dense);
  return f;
}

// One pass; returns the sum of the layers' index losses.
double pass(ModelFixture& f, const LossScales& scales) {
  Model& model = f.model();
  zero(f.ctx(), model.params().grads());
  zero(f.ctx(), model.index_loss());
  model.forward(f.ctx(), f.activations());
  model.loss_and_backward(f.ctx(), f.activations(), scales);
  double sum = 0;
  for (const double loss : read_floats(f.ctx(), model.index_loss())) sum += loss;
  return sum;
}

bool belongs_to_index(ModelFixture& f, int64_t i) {
  return is_index(f.model().params().specs()[static_cast<size_t>(i)].role);
}

double largest(const std::vector<double>& v) {
  double most = 0;
  for (const double x : v) most = std::max(most, std::abs(x));
  return most;
}

}  // namespace

TEST_CASE("taught: the index's gradients are differences of its loss, and only its own", "[model]") {
  for (const Case& c : cases()) {
    INFO(c.name);
    ModelFixture f = build(c);
    const int64_t params = f.model().params().count();
    pass(f, {1.0 / kTokens, 0.0});
    std::vector<std::vector<double>> without;
    for (int64_t i = 0; i < params; ++i) without.push_back(f.grad(i));
    constexpr double kScale = 0.3;
    const double loss = pass(f, {1.0 / kTokens, kScale});
    CHECK(loss > 0);
    std::vector<std::vector<double>> grads;
    for (int64_t i = 0; i < params; ++i) grads.push_back(f.grad(i));
    // Lists are constants of the differences.
    for (int64_t i = 0; i < c.config.n_layers && !c.dense; ++i)
      if (c.config.has_index(i)) f.set_lists(i, f.lists(i));
    for (int64_t i = 0; i < params; ++i) {
      const ParamSpec& spec = f.model().params().specs()[static_cast<size_t>(i)];
      INFO(spec.name);
      if (!belongs_to_index(f, i)) {
        CHECK(grads[static_cast<size_t>(i)] == without[static_cast<size_t>(i)]);  // to the bit
        continue;
      }
      CHECK(largest(without[static_cast<size_t>(i)]) == 0);
      CHECK(largest(grads[static_cast<size_t>(i)]) > 0);
      // An index moves no later layer's input, so a difference sees its own layer's loss alone.
      constexpr double kStep = 1e-5;
      for (int64_t element = 0; element < spec.shape.numel(); element += std::max<int64_t>(1, spec.shape.numel() / 5)) {
        const double x = f.get_f64(i, element);
        f.set_f64(i, element, x + kStep);
        const double above = pass(f, {0.0, 0.0});
        f.set_f64(i, element, x - kStep);
        const double below = pass(f, {0.0, 0.0});
        f.set_f64(i, element, x);
        const double grad = grads[static_cast<size_t>(i)][static_cast<size_t>(element)];
        CHECK(grad == Approx(kScale * (above - below) / (2 * kStep)).epsilon(1e-6).margin(1e-8));
      }
    }
  }
}

TEST_CASE("taught: rows of padding teach nothing, and a document of one token has no index loss", "[model]") {
  for (const bool dense : {false, true}) {
    const Case c{"", taught(Branches::selected), dense};
    ModelFixture f = build(c);
    const auto padded_from = [&](int32_t token) { write(f.ctx(), f.activations().padding_begin, &token); };
    const double whole = pass(f, {0.0, 1.0});
    double sum = 0, before = 0;
    for (int32_t t = 1; t <= kTokens; ++t) {
      padded_from(t);
      const double now = pass(f, {0.0, 1.0});
      sum += now - before, before = now;
      if (t == 1) CHECK(now == 0);  // one key: student and teacher are 1
    }
    CHECK(sum == Approx(whole).epsilon(1e-12));
    padded_from(0);
    CHECK(pass(f, {0.0, 1.0}) == 0);
    for (int64_t i = 0; i < f.model().params().count(); ++i)
      if (belongs_to_index(f, i)) CHECK(largest(f.grad(i)) == 0);
  }
}

TEST_CASE("taught: one softmax over all blocks is dense attention, and later tokens change no earlier row", "[model]") {
  ModelConfig config = taught(Branches::selected);
  config.nsa.n_sel = (kTokens + config.nsa.l_sel - 1) / config.nsa.l_sel;
  config.resolve();
  ModelFixture selected(config, 1, kTokens, Device::cpu(), DType::f64, 3, 0.3);
  const double loss = selected.loss_and_grads();
  std::vector<std::vector<double>> grads;
  for (int64_t i = 0; i < selected.model().params().count(); ++i) grads.push_back(selected.grad(i));
  selected.model().attend_densely(true);
  CHECK(selected.loss_and_grads() == Approx(loss).epsilon(1e-13));
  for (int64_t i = 0; i < selected.model().params().count(); ++i)
    for (size_t j = 0; j < grads[static_cast<size_t>(i)].size(); ++j)
      CHECK(selected.grad(i)[j] == Approx(grads[static_cast<size_t>(i)][j]).epsilon(1e-9).margin(1e-12));
  for (const Branches branches : {Branches::all, Branches::selected}) {
    ModelFixture f(taught(branches), 1, kTokens, Device::cpu(), DType::f64, 3, 0.3);
    f.loss();
    const std::vector<double> before = read_floats(f.ctx(), f.activations().x(2));
    std::vector<int32_t> tokens(kTokens);
    read(f.ctx(), tokens.data(), f.activations().tokens);
    constexpr size_t kChanged = 31;
    tokens[kChanged] = (tokens[kChanged] + 1) % 37;
    write(f.ctx(), f.activations().tokens, tokens.data());
    f.loss();
    const std::vector<double> after = read_floats(f.ctx(), f.activations().x(2));
    const size_t width = before.size() / kTokens;
    CHECK(std::equal(before.begin(), before.begin() + static_cast<std::ptrdiff_t>(kChanged * width), after.begin()));
    CHECK(before != after);
  }
}

TEST_CASE("taught: all other parameters begin as they do without an index", "[model]") {
  ModelConfig plain = small_model(), index = taught(Branches::all);
  ModelFixture a(plain, 1, 8, Device::cpu(), DType::f32), b(index, 1, 8, Device::cpu(), DType::f32);
  a.model().params().init(a.ctx(), 5), b.model().params().init(b.ctx(), 5);
  Params &with = b.model().params(), &without = a.model().params();
  const auto values = [](ModelFixture& f, int64_t i) {
    return read_floats(f.ctx(), f.model().params().part(f.model().params().weights(), i));
  };
  for (int64_t i = 0; i < without.count(); ++i) {
    CHECK(with.specs()[static_cast<size_t>(i)].name == without.specs()[static_cast<size_t>(i)].name);
    CHECK(values(a, i) == values(b, i));
  }
  CHECK(with.count() == without.count() + 2 * index.n_layers);
  for (int64_t i = without.count(); i < with.count(); ++i) {
    INFO(with.specs()[static_cast<size_t>(i)].name);
    CHECK(belongs_to_index(b, i));
    CHECK(with.index_range().contains({with.offset(i), with.offset(i) + 1}));
    CHECK(largest(values(b, i)) > 0.5 * index.init_std);
    CHECK(largest(values(b, i)) < 6 * index.init_std);
  }
}
