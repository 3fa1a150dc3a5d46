// Models whose layers differ (model.dense_layers), NSA branches that share keys and values (nsa.shared_kv), initial
// gates (nsa.gate_init), scaled rotations (model.rope_scaling) and none (model.nope_layers), and NSA models that begin
// from dense weights.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "model/flops.h"
#include "model/from_dense.h"
#include "tests/support/model_fixture.h"
#include "tests/support/op_driver.h"
#include "tests/support/test.h"
#include "train/inference.h"
#include "train/monitor/grad_ledger.h"

using namespace triad;
using namespace triad::test;

namespace {

// The UsageError message that such a model's config throws.
std::string error_of(const std::function<void(ModelConfig&)>& change) {
  try {
    changed(change);
  } catch (const UsageError& e) { return e.what(); }
  return "(nothing was thrown)";
}

// A parameter's index.
int64_t index_of(ModelFixture& f, const std::string& name) {
  const std::vector<ParamSpec>& specs = f.model().params().specs();
  const auto at = std::find_if(specs.begin(), specs.end(), [&](const ParamSpec& p) { return p.name == name; });
  REQUIRE(at != specs.end());
  return at - specs.begin();
}

}  // namespace

TEST_CASE("layers: model.dense_layers is parsed once, and bad text is an error that names it", "[model]") {
  const ModelConfig c = changed([](ModelConfig& m) { m.dense_layers = "0:1,2:4"; });
  const AttentionKind nsa = AttentionKind::nsa, dense = AttentionKind::dense;
  for (const auto& [layer, kind] : {std::pair{0, dense}, {1, nsa}, {2, dense}, {3, dense}})
    CHECK(c.attention_of(layer) == kind);
  CHECK(c.has_nsa());
  CHECK(c.count_nsa_layers() == 1);
  for (const auto& [text, word] : {std::pair{"0", "ranges of layers such as 0:2,30:32"},
                                   {"0:1=mlp", "ranges of layers"},
                                   {"0:1=", "ranges of layers"},
                                   {"0:2,", "ranges of layers"},
                                   {"-1:2", "ranges of layers"},
                                   {"0 :2", "ranges of layers"},
                                   {"2:2", "the range 2:2 is not one of the layers 0:4"},
                                   {"3:5", "the range 3:5 is not one of the layers 0:4"},
                                   {"0:2,1:3", "layer 1 is named twice"},
                                   {"0:2,2:4", "every layer"}}) {
    const std::string message = error_of([&](ModelConfig& m) { m.dense_layers = text; });
    INFO(message);
    CHECK(message.find(fmt::format("model.dense_layers is \"{}\"", text)) != std::string::npos);
    CHECK(message.find(word) != std::string::npos);
  }
  // The key may stay in the dense control run's config.
  const ModelConfig control =
      changed([](ModelConfig& m) { m.attention = AttentionKind::dense, m.dense_layers = "0:4"; });
  CHECK(control.count_nsa_layers() == 0);
}

TEST_CASE("layers: impossible rotations and gates are errors that name key and value", "[model]") {
  using Change = void (*)(ModelConfig&);
  const std::vector<std::pair<Change, std::vector<std::string>>> cases = {
      {[](ModelConfig& m) { m.rope_scaling = RopeScaling::llama3, m.rope_scale = 2; },
       {"model.rope_scale is 2", "llama3", "must be 1"}},
      {[](ModelConfig& m) { m.rope_scaling = RopeScaling::yarn, m.rope_scale = 0.5; },
       {"model.rope_scale is 0.5", "yarn", "must be 1"}},
      {[](ModelConfig& m) { m.rope_scaling = RopeScaling::llama3, m.rope_high_freq = 1; },
       {"model.rope_high_freq is 1", "model.rope_low_freq, which is 1"}},
      {[](ModelConfig& m) { m.rope_scaling = RopeScaling::yarn, m.rope_beta_slow = 40; },
       {"model.rope_beta_fast is 32", "model.rope_beta_slow, which is 40"}},
      {[](ModelConfig& m) { m.rope_scaling = RopeScaling::yarn, m.rope_theta = 1; }, {"model.rope_theta is 1", "yarn"}},
      {[](ModelConfig& m) {
         m.nsa.gate_init = {0.1, 0.3};
       },
       {"nsa.gate_init is [0.1, 0.3]", "three numbers"}},
      {[](ModelConfig& m) {
         m.nsa.gate_init = {0.1, 0.3, 1}, m.nsa.gate.kind = GateKind::sigmoid;
       },
       {"nsa.gate_init is [0.1, 0.3, 1]", "sigmoid", "1 is not"}}};
  for (const auto& [change, words] : cases) {
    const std::string message = error_of(change);
    for (const std::string& word : words) {
      INFO(message << " lacks " << word);
      CHECK(message.find(word) != std::string::npos);
    }
  }
  // Keys for a scaling that isn't chosen don't matter.
  CHECK(error_of([](ModelConfig& m) { m.rope_high_freq = 0.5, m.rope_beta_slow = 40, m.rope_scale = 2; }) ==
        "(nothing was thrown)");
}

// The last token sees all others, at other distances once they are reversed, or the same blocks of four, if its index
// selects those with the same tokens.
TEST_CASE("layers: without rotation a layer and its index attend by content alone", "[model]") {
  constexpr int64_t kTokens = 33;
  for (const std::string nope_layers : {"", "0:1"})
    for (const bool selects : {false, true}) {
      INFO("layers without rotation: " << nope_layers << ", an index: " << selects);
      ModelConfig config = small_model();
      config.n_layers = 1, config.nope_layers = nope_layers;
      if (!selects) config.attention = AttentionKind::dense;
      config.nsa.branches = Branches::selected, config.nsa.selector = Selector::index, config.nsa.d_index = 6;
      config.nsa.l_sel = 4, config.nsa.n_sel = 3, config.nsa.init_blocks = 0, config.nsa.local_blocks = 1;
      config.resolve();
      CHECK(config.rotates(0) == nope_layers.empty());
      ModelFixture f(config, 1, kTokens, Device::cpu(), DType::f64);
      const auto last_row = [&](const std::vector<int32_t>& tokens) {
        write(f.ctx(), f.activations().tokens, tokens.data());
        f.model().forward(f.ctx(), f.activations());
        const std::vector<double> x = read_floats(f.ctx(), f.activations().x(1));
        return std::vector<double>(x.end() - config.dim, x.end());
      };
      std::vector<int32_t> tokens(kTokens);
      std::iota(tokens.begin(), tokens.end(), 1);
      const std::vector<double> before = last_row(tokens);
      std::reverse(tokens.begin(), tokens.end() - 1);
      const double difference = relative_error(last_row(tokens), before);
      if (nope_layers.empty())
        CHECK(difference > 1e-4);
      else
        CHECK(difference < 1e-13);
    }
}

TEST_CASE("layers: a dense layer of an NSA model has a dense layer's tensors", "[model]") {
  const ModelConfig mixed = changed([](ModelConfig&m) { m.dense_layers = "0:1,3:4", m.nsa.phi = Phi::mlp; }),
                    nsa = changed([](ModelConfig&m) { m.nsa.phi = Phi::mlp; }),
                    dense = changed([](ModelConfig&m) { m.attention = AttentionKind::dense; });
  for (const int64_t layer : {0, 3}) CHECK(names_of_layer(mixed, layer) == names_of_layer(dense, layer));
  for (const int64_t layer : {1, 2}) CHECK(names_of_layer(mixed, layer) == names_of_layer(nsa, layer));
  CHECK(2 * count_parameters(mixed) == count_parameters(nsa) + count_parameters(dense));
  // FLOPs add up by layer.
  const auto attention = [](const ModelConfig& c) {
    return training_flops(c, 2, 70) - product_flops(c, 2, 70).layers - product_flops(c, 2, 70).head;
  };
  CHECK(2 * attention(mixed) == Approx(attention(nsa) + attention(dense)));
}

TEST_CASE("layers: with shared_kv only k_win_proj and v_win_proj exist", "[model]") {
  const ModelConfig separate = small_model();
  ModelConfig shared = separate;
  shared.nsa.shared_kv = true;
  std::set<std::string> expected = names_of_layer(separate, 1);
  for (const char* branch : {"cmp", "sel"})
    for (const char letter : {'k', 'v'})
      CHECK(expected.erase(fmt::format("attn.{}_{}_proj.weight", letter, branch)) == 1);
  CHECK(names_of_layer(shared, 1) == expected);
  const int64_t pair = shared.n_kv_groups * (shared.d_k + shared.d_v) * shared.dim;
  CHECK(count_parameters(separate) - count_parameters(shared) == shared.n_layers * 2 * pair);
}

// A model with separate but equal projections computes what the shared model computes, and the shared gradients sum the
// branches' gradients.
TEST_CASE("layers: shared k and v are equal to separate projections of equal values", "[model]") {
  for (const Phi phi : {Phi::avg, Phi::conv, Phi::mlp}) {
    ModelConfig config = small_model();
    config.nsa.phi = phi;
    ModelFixture separate(config, 2, 45, Device::cpu(), DType::f64);
    config.nsa.shared_kv = true;
    ModelFixture shared(config, 2, 45, Device::cpu(), DType::f64);
    const auto each = [](ModelFixture& f, int64_t i, const std::function<double(int64_t)>& value) {
      for (int64_t j = 0; j < f.model().params().specs()[static_cast<size_t>(i)].shape.numel(); ++j)
        f.set_f64(i, j, value(j));
    };
    for (int64_t i = 0; i < separate.model().params().count(); ++i) {
      std::string name = separate.model().params().specs()[static_cast<size_t>(i)].name;
      for (const char* branch : {"_cmp_proj", "_sel_proj"})
        if (const size_t at = name.find(branch); at != std::string::npos) name.replace(at, 9, "_win_proj");
      const int64_t from = index_of(shared, name);
      each(separate, i, [&](int64_t j) { return shared.get_f64(from, j); });
    }
    CHECK(shared.loss_and_grads() == Approx(separate.loss_and_grads()).epsilon(1e-13));
    for (int64_t i = 0; i < shared.model().params().count(); ++i) {
      const std::string name = shared.model().params().specs()[static_cast<size_t>(i)].name;
      std::vector<double> expected = separate.grad(index_of(separate, name));
      if (const size_t at = name.find("_win_proj"); at != std::string::npos)
        for (const char* branch : {"_cmp_proj", "_sel_proj"}) {
          std::string other = name;
          const std::vector<double> more = separate.grad(index_of(separate, other.replace(at, 9, branch)));
          for (size_t j = 0; j < more.size(); ++j) expected[j] += more[j];
        }
      const std::vector<double> got = shared.grad(i);
      double error = 0, size = 0;
      for (size_t j = 0; j < got.size(); ++j)
        error += (got[j] - expected[j]) * (got[j] - expected[j]), size += expected[j] * expected[j];
      INFO(word_of(phi) << ": " << name);
      CHECK(size > 0);
      CHECK(std::sqrt(error) <= 1e-12 * std::sqrt(size));
    }
  }
}

TEST_CASE("layers: gate_init gives the gates of fresh weights", "[model]") {
  const std::vector<double> wanted = {0.1, 0.3, 0.6};
  for (const GateKind kind : {GateKind::softmax, GateKind::sigmoid})
    for (const double temperature : {1.0, 0.5}) {
      ModelConfig config = small_model();
      config.nsa.gate.kind = kind, config.nsa.gate.temperature = temperature, config.nsa.gate_init = wanted;
      config.resolve();
      ModelFixture f(config, 1, 40, Device::cpu(), DType::f64);
      f.model().params().init(f.ctx(), 5);
      f.loss();
      const std::vector<double> gates = read_floats(f.ctx(), f.activations().layer(1).attention.nsa.gate);
      const size_t rows = gates.size() / 3;
      for (size_t b = 0; b < 3; ++b)
        for (size_t i = 0; i < rows; ++i) CHECK(gates[b * rows + i] == Approx(wanted[b]).epsilon(1e-6));
    }
}

TEST_CASE("layers: shared k and v expect a zero gradient only if it is zero in every branch", "[model]") {
  ModelConfig config = small_model();
  config.nsa.shared_kv = true, config.dense_layers = "1:2";
  config.resolve();
  const auto zero = [&](const char* name, int64_t seq_len) {
    for (const ParamSpec& p : param_specs(config))
      if (p.name == name) return expects_zero_gradient(config, seq_len, /*step=*/5, p);
    return false;
  };
  const char *k = "blocks.0.attn.k_win_proj.weight", *v = "blocks.0.attn.v_win_proj.weight";
  CHECK_FALSE(zero(k, 45));
  CHECK_FALSE(zero(k, config.nsa.l - 1));  // too short for the compressed branch, not for the others
  config.nsa.gate.force = Branch::cmp;
  CHECK_FALSE(zero(k, 45));
  CHECK(zero(k, config.nsa.l - 1));
  CHECK(zero(v, config.nsa.l - 1));
  config.nsa.gate.force = Branch::win, config.nsa.w = 1;  // one key: its softmax is always 1
  CHECK(zero(k, 45));
  CHECK_FALSE(zero(v, 45));
  CHECK_FALSE(zero("blocks.1.attn.k_win_proj.weight", 45));  // weights in a dense layer
}

TEST_CASE("layers: the dense tensor that begins a parameter of an NSA model", "[model]") {
  ModelConfig config = small_model();
  config.nsa.phi = Phi::mlp, config.dense_layers = "1:2";
  config.resolve();
  std::map<std::string, std::string> sources;
  for (const ParamSpec& p : param_specs(config)) sources[p.name] = dense_source(p);
  for (const char letter : {'k', 'v'})
    for (const char* branch : {"cmp", "sel", "win"})
      CHECK(sources.at(fmt::format("blocks.0.attn.{}_{}_proj.weight", letter, branch)) ==
            fmt::format("blocks.0.attn.{}_win_proj.weight", letter));
  std::set<std::string> fresh, used;
  for (const auto& [name, source] : sources) source.empty() ? fresh.insert(name) : used.insert(source);
  std::set<std::string> gates_and_phi;
  for (const char* name : {"gate.fc1.weight", "gate.fc1.bias", "gate.fc2.weight", "gate.fc2.bias", "phi_k.pos",
                           "phi_k.fc1.weight", "phi_k.fc2.weight", "phi_v.pos", "phi_v.fc1.weight", "phi_v.fc2.weight"})
    gates_and_phi.insert(std::string("blocks.0.attn.") + name);
  CHECK(fresh == gates_and_phi);
  // Together the sources are exactly the dense model's tensors.
  ModelConfig dense = config;
  dense.attention = AttentionKind::dense;
  dense.resolve();
  std::set<std::string> all;
  for (const ParamSpec& p : param_specs(dense)) all.insert(p.name);
  CHECK(used == all);
}
