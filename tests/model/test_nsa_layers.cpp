// Models whose layers have other NSA options (nsa.layers), and layers that attend to a sliding window alone
// (nsa.branches win): keys and their errors, equal bits where the options are equal, and the limits in which a window
// is dense attention or NSA's own window. Gradients, recomputation, documents and decoding: the tables of
// test_model.cpp, test_recompute.cpp, test_documents.cpp and test_decode.cpp.
#include <fmt/format.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "model/flops.h"
#include "tests/support/model_fixture.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/inference.h"
#include "train/monitor/grad_ledger.h"

using namespace triad;
using namespace triad::test;

namespace {

// The config of a run with this group nsa, as JSON text.
Config with_nsa(const std::string& nsa, const std::string& more = "") {
  const std::string text = fmt::format(
      R"({{"model":{{"dim":8,"n_layers":4,"n_heads":2,"n_kv_groups":1,"d_k":4,"d_v":4,"vocab_size":9{}}},"nsa":{},)"
      R"("data":{{"kind":"synthetic"}},"train":{{"steps":1,"seq_len":8,"micro_batch_size":1}},"log":{{"out_dir":"x"}}}})",
      more, nsa);
  return config_from_json(parse_json(text, "test"));
}
std::string error_of(const std::string& nsa, const std::string& more = "") {
  try {
    with_nsa(nsa, more);
  } catch (const UsageError& e) { return e.what(); }
  return "(nothing was thrown)";
}

const std::string kGroup = R"("l":8,"d":4,"l_sel":8,"n_sel":4,"w":11)";
std::string layers(const std::string& entries) { return "{" + kGroup + ",\"layers\":[" + entries + "]}"; }

// Loss, logits' source and all gradients of a pass.
std::vector<double> results_of(const ModelConfig& c, DType dtype, const std::vector<int32_t>& bounds = {}) {
  constexpr int64_t kTokens = 70;
  ModelFixture f(c, 1, kTokens, Device::cpu(), dtype, 3, 0.3, {}, {}, static_cast<int64_t>(bounds.size()));
  if (!bounds.empty()) f.set_documents(bounds);
  std::vector<double> all = {f.loss_and_grads()};
  const std::vector<double> x = read_floats(f.ctx(), f.activations().x(c.n_layers));
  all.insert(all.end(), x.begin(), x.end());
  for (int64_t i = 0; i < f.model().params().count(); ++i) {
    const std::vector<double> grad = f.grad(i);
    all.insert(all.end(), grad.begin(), grad.end());
  }
  return all;
}

void check_close(const std::vector<double>& got, const std::vector<double>& want, double tolerance) {
  REQUIRE(got.size() == want.size());
  double difference = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i)
    difference += (got[i] - want[i]) * (got[i] - want[i]), size += want[i] * want[i];
  CHECK(std::sqrt(difference) <= tolerance * std::sqrt(size));
}

}  // namespace

TEST_CASE("nsa.layers: an entry overrides the group, dense_layers has the last word, and the echo reads back",
          "[model]") {
  const Config config =
      with_nsa(layers(R"({"layers":"0:1,3:4","l":4,"d":2,"init_blocks":0},{"layers":"1:3","branches":"win","w":5})"),
               R"(,"dense_layers":"2:3")");
  const ModelConfig& c = config.model;
  CHECK(c.nsa_at(0).l == 4);
  CHECK(c.nsa_at(3).d == 2);
  CHECK(c.nsa_at(3).init_blocks == 0);
  CHECK(c.nsa_at(3).w == 11);
  CHECK(c.nsa_at(1).w == 5);
  CHECK(c.nsa_at(-1).l == 8);
  const AttentionKind kinds[] = {AttentionKind::nsa, AttentionKind::window, AttentionKind::dense, AttentionKind::nsa};
  for (int64_t i = 0; i < 4; ++i) CHECK(c.attention_of(i) == kinds[i]);
  CHECK(c.layers_text() == "2 layers with NSA, 1 with a sliding window and 1 with dense attention");
  CHECK_FALSE(c.has_index());
  const Json echo = config_to_json(config);
  CHECK(echo["nsa"]["layers"] ==
        Json::parse(R"([{"layers":"0:1,3:4","l":4,"d":2,"init_blocks":0},{"layers":"1:3","branches":"win","w":5}])"));
  CHECK(config_to_json(config_from_json(echo)) == echo);
  CHECK(config_to_json(with_nsa("{" + kGroup + "}"))["nsa"]["layers"].is_null());
  // Branches that need no strides and lists, with layers that bring their own.
  CHECK(error_of(R"({"branches":"win","w":5})") == "(nothing was thrown)");
  CHECK(error_of(R"({"branches":"win","w":5,"layers":[{"layers":"0:1","branches":"cmp,sel,win","l":8,"d":4,"l_sel":8,)"
                 R"("n_sel":4}]})") == "(nothing was thrown)");
}

TEST_CASE("nsa.layers: entries that cannot be are errors that name key and value", "[model]") {
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {layers(R"({"layers":"0:2,1:3","d":2})"), {"nsa.layers[0].layers is \"0:2,1:3\"", "layer 1 is named twice"}},
      {layers(R"({"layers":"0:2","d":2},{"layers":"1:3","d":2})"),
       {"nsa.layers[1].layers is \"1:3\"", "layer 1 is named twice", "nsa.layers[0]"}},
      {layers(R"({"layers":"2:5","d":2})"), {"nsa.layers[0].layers is \"2:5\"", "not one of the layers 0:4"}},
      {layers(R"({"layers":"0:1=mlp","d":2})"), {"nsa.layers[0].layers is \"0:1=mlp\"", "ranges of layers"}},
      {layers(R"({"layers":"","d":2})"), {"nsa.layers[0].layers is \"\"", "ranges of layers"}},
      {layers(R"({"d":2})"), {"it lacks nsa.layers[0].layers"}},
      {layers(R"({"layers":"0:1","stride":2})"), {"unknown key nsa.layers[0].stride (value 2)"}},
      {layers(R"({"layers":"0:1","gate":"sigmoid"})"),
       {"nsa.layers[0].gate is \"sigmoid\"", "cannot differ between layers", "nsa.gate"}},
      {layers(R"({"layers":"0:1","phi":"conv"})"), {"nsa.layers[0].phi is \"conv\"", "cannot differ between layers"}},
      {layers(R"({"layers":"0:1","shared_kv":true})"), {"nsa.layers[0].shared_kv is true", "cannot differ"}},
      {layers(R"({"layers":"0:1","d":3})"), {"nsa.layers[0], for layers 0:1", "nsa.d is 3", "does not divide"}},
      {layers(R"({"layers":"0:1","n_sel":2})"), {"nsa.layers[0], for layers 0:1", "nsa.n_sel is 2", "3 are needed"}},
      {layers(R"({"layers":"0:1","branches":"sel"})"), {"nsa.layers[0]", "nsa.branches is sel", "selector index"}},
      {layers(R"({"layers":"0:1","branches":"cmp"})"), {"nsa.layers[0].branches is \"cmp\"", "win"}},
      {layers(R"({"layers":"0:1","w":0})"), {"nsa.layers[0].w is 0"}},
      {layers(R"({"layers":"0:1","selector":"index","d_index":7})"), {"nsa.layers[0]", "nsa.d_index is 7", "even"}},
      {layers(R"({"layers":"0:1","select_every":3})"), {"nsa.layers[0]", "nsa.select_every is 3", "does not divide"}},
      {layers("3"), {"nsa.layers[0] is 3", "an object"}},
      {layers(""), {"nsa.layers is []", "at least one"}},
      {R"({"branches":"win","w":5,"layers":[{"layers":"0:1","branches":"cmp,sel,win","l":8,"d":4,"l_sel":8}]})",
       {"nsa.layers[0]", "it needs n_sel", "nsa.n_sel"}},
      {R"({"branches":"win","w":5,"gate":"sigmoid"})", {"nsa.gate is sigmoid", "that is win, without gates"}},
      {R"({"branches":"win"})", {"lacks nsa.w"}},
      {"{" + kGroup + R"(,"gate":"sigmoid","layers":[{"layers":"0:4","branches":"win"}]})",
       {"nsa.gate is sigmoid", "no layer has"}}};
  for (const auto& [nsa, words] : cases) {
    const std::string message = error_of(nsa);
    for (const std::string& word : words) {
      INFO(nsa << ": " << message << " lacks " << word);
      CHECK(message.find(word) != std::string::npos);
    }
  }
}

TEST_CASE("nsa.layers: entries with the group's own values change no bit", "[model]") {
  const ModelConfig group = changed([](ModelConfig& c) { c.nsa.phi = Phi::mlp, c.dense_layers = "2:3"; });
  ModelConfig repeated = group;
  const NsaConfig& n = group.nsa;
  repeated.nsa.layers = {{.layers = "0:1,2:4",
                          .branches = n.branches,
                          .l = n.l,
                          .d = n.d,
                          .l_sel = n.l_sel,
                          .n_sel = n.n_sel,
                          .w = n.w,
                          .init_blocks = n.init_blocks,
                          .local_blocks = n.local_blocks,
                          .selector = n.selector}};
  repeated.resolve();
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const std::vector<int32_t>& bounds : {std::vector<int32_t>{}, {0, 20, 33, 70}})
      CHECK(results_of(repeated, dtype, bounds) == results_of(group, dtype, bounds));
  CHECK(training_flops(repeated, 2, 70) == training_flops(group, 2, 70));
}

TEST_CASE("nsa.layers: layers have the tensors and the FLOPs of their own branches", "[model]") {
  const ModelConfig c = layered_model(), dense = changed([](ModelConfig&m) { m.attention = AttentionKind::dense; });
  CHECK(names_of_layer(c, 0) == names_of_layer(c, 1));
  CHECK(names_of_layer(c, 2) == names_of_layer(dense, 2));
  std::set<std::string> selected = names_of_layer(dense, 3);
  selected.insert({"attn.index_q_proj.weight", "attn.index_k_proj.weight"});
  CHECK(names_of_layer(c, 3) == selected);
  CHECK(c.has_index());
  for (const int64_t i : {0, 1, 2}) CHECK_FALSE(c.has_index(i));
  const AttendedPairs window = attended_pairs(c, int64_t{2}, 70);
  CHECK(window.win == 9 * 70 - 9 * 8 / 2);
  CHECK(window.all() == window.win);
  CHECK(attended_pairs(c, int64_t{1}, 70).win == 5 * 70 - 5 * 4 / 2);
  // Gradients that must be zero: with one key a softmax is constant.
  ModelConfig single = c;
  single.nsa.layers[0].w = 1, single.nsa.layers[1].w = 1;
  single.resolve();
  for (const ParamSpec& p : param_specs(single)) {
    const bool zero = p.name == "blocks.1.attn.k_win_proj.weight";
    if (p.name.ends_with("k_win_proj.weight") && p.layer != 2) CHECK(expects_zero_gradient(single, 70, 5, p) == zero);
  }
}

TEST_CASE("nsa.layers: a window alone is dense attention if it holds the sequence", "[model]") {
  for (const bool norms : {false, true}) {
    const ModelConfig window = changed(
        [&](ModelConfig& c) { c.nsa.branches = Branches::window, c.nsa.w = 70, c.qk_norm = c.qkv_bias = norms; });
    const ModelConfig dense =
        changed([&](ModelConfig& c) { c.attention = AttentionKind::dense, c.qk_norm = c.qkv_bias = norms; });
    for (const DType dtype : {DType::f64, DType::f32})
      for (const std::vector<int32_t>& bounds : {std::vector<int32_t>{}, {0, 20, 33, 70}})
        check_close(results_of(window, dtype, bounds), results_of(dense, dtype, bounds),
                    dtype == DType::f64 ? 1e-13 : 1e-6);
    ModelConfig narrow = window;
    narrow.nsa.w = 69;
    CHECK(results_of(narrow, DType::f64) != results_of(window, DType::f64));
  }
}

TEST_CASE("nsa.layers: a window alone is NSA's window branch with the gate forced to it", "[model]") {
  const ModelConfig window =
      changed([](ModelConfig& c) { c.nsa.layers = {{.layers = "0:4", .branches = Branches::window}}; });
  const ModelConfig forced = changed([](ModelConfig& c) { c.nsa.gate.force = Branch::win; });
  ModelFixture a(window, 1, 70, Device::cpu(), DType::f64, 3, 0.3), b(forced, 1, 70, Device::cpu(), DType::f64, 3, 0.3);
  const auto part = [](ModelFixture& f, const std::string& name) {
    const std::vector<ParamSpec>& specs = f.model().params().specs();
    size_t i = 0;
    while (specs.at(i).name != name) ++i;
    return f.model().params().part(f.model().params().weights(), static_cast<int64_t>(i));
  };
  for (const ParamSpec& p : a.model().params().specs()) copy(b.ctx(), part(b, p.name), part(a, p.name));
  const double loss = a.loss_and_grads();
  CHECK(b.loss_and_grads() == Approx(loss).epsilon(1e-13));
  for (int64_t i = 0; i < a.model().params().count(); ++i) {
    const std::string& name = a.model().params().specs()[static_cast<size_t>(i)].name;
    INFO(name);
    int64_t j = 0;
    while (b.model().params().specs()[static_cast<size_t>(j)].name != name) ++j;
    check_close(b.grad(j), a.grad(i), 1e-12);
  }
}
