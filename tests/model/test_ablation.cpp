// Options that switch NSA parts off (force_branch, uniform_gate, stopgrad_gates), and runtime.asserts, which names the
// first invalid value.
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>

#include "io/json_config.h"
#include "tests/support/model_fixture.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/inference.h"

using namespace triad;
using namespace triad::test;

namespace {

double largest(const std::vector<double>& v) {
  double most = 0;
  for (const double x : v) most = std::max(most, std::abs(x));
  return most;
}

// Returns the model's gradients by parameter name; ModelFixture draws the parameters.
std::map<std::string, std::vector<double>> gradients(const ModelConfig& config, Device device, DType dtype) {
  ModelFixture f(config, 2, 45, device, dtype, 3, 0.3);
  f.loss_and_grads();
  std::map<std::string, std::vector<double>> out;
  for (int64_t i = 0; i < f.model().params().count(); ++i)
    out[f.model().params().specs()[static_cast<size_t>(i)].name] = f.grad(i);
  return out;
}

bool belongs_to(const std::string& name, const std::string& branch) {
  if (name.find("_" + branch + "_proj") != std::string::npos) return true;
  return branch == "cmp" && name.find("attn.phi_") != std::string::npos;
}

// Checks that parameters in switched-off branches, and in the gate, have gradients exactly zero, and all others don't.
void check_forced(Device device, DType dtype) {
  for (const Phi phi : {Phi::avg, Phi::conv, Phi::mlp})
    for (const Branch forced : {Branch::cmp, Branch::sel, Branch::win}) {
      ModelConfig config = small_model();
      config.nsa.phi = phi, config.nsa.gate.force = forced;
      for (const auto& [name, grad] : gradients(config, device, dtype)) {
        bool off = name.find("attn.gate.") != std::string::npos;
        for (const Branch other : {Branch::cmp, Branch::sel, Branch::win})
          off = off || (other != forced && belongs_to(name, std::string(word_of(other))));
        INFO(word_of(forced) << ", phi " << word_of(phi) << ": " << name << " " << largest(grad));
        CHECK((largest(grad) == 0) == off);
      }
    }
}

// Returns the first layer's gates [3,B,T,Hkv] after a forward pass.
std::vector<double> gates(ModelFixture& f) {
  f.loss();
  return read_floats(f.ctx(), f.activations().layer(0).attention.nsa.gate);
}

void check_gates(Device device, DType dtype) {
  for (const Branch forced : {Branch::cmp, Branch::sel, Branch::win}) {
    ModelConfig config = small_model();
    config.nsa.gate.force = forced;
    ModelFixture f(config, 1, 40, device, dtype);
    const std::vector<double> g = gates(f);
    const size_t plane = g.size() / 3;
    for (size_t i = 0; i < g.size(); ++i) CHECK(g[i] == (i / plane == static_cast<size_t>(forced) ? 1 : 0));
  }
  ModelConfig config = small_model();
  config.nsa.gate.uniform = true;
  ModelFixture uniform(config, 1, 40, device, dtype);
  for (const double g : gates(uniform)) CHECK(g == Approx(1.0 / 3).epsilon(1e-7));
  config.nsa.gate.uniform = false;
  ModelFixture baseline(config, 1, 40, device, dtype);
  config.nsa.gate.stop_gradient = true;
  ModelFixture stopped(config, 1, 40, device, dtype);
  CHECK(gates(baseline) == gates(stopped));  // stop_gradient does not change the forward pass
}

// If fc1 is zero, the gates are constants, which come from fc2's bias. Then stop_gradient removes the gate's own
// gradients only: all other gradients equal those without stop_gradient.
void check_stopgrad_against_constant_gates(Device device, DType dtype) {
  std::map<std::string, std::vector<double>> grads[2];
  for (const bool stop : {false, true}) {
    ModelConfig config = small_model();
    config.nsa.gate.stop_gradient = stop;
    ModelFixture f(config, 2, 45, device, dtype, 3, 0.3);
    for (int64_t i = 0; i < f.model().params().count(); ++i) {
      const ParamSpec& spec = f.model().params().specs()[static_cast<size_t>(i)];
      if (spec.name.find("gate.fc1") == std::string::npos && spec.name.find("gate.fc2.weight") == std::string::npos)
        continue;
      std::fill_n(f.parameters().begin() + f.model().params().offset(i), spec.shape.numel(), 0.0f);
    }
    f.upload();
    f.loss_and_grads();
    for (int64_t i = 0; i < f.model().params().count(); ++i)
      grads[stop][f.model().params().specs()[static_cast<size_t>(i)].name] = f.grad(i);
  }
  for (const auto& [name, baseline] : grads[0]) {
    INFO(name);
    if (name.find("attn.gate.") != std::string::npos)
      CHECK(largest(grads[1][name]) == 0);
    else
      CHECK(grads[1][name] == baseline);
  }
  CHECK(largest(grads[0]["blocks.0.attn.gate.fc2.bias"]) > 0);
}

// Applies `damage` to a small model, runs a pass with asserts, and returns the error's message; "" if there was no
// error.
std::string found(
    Device device, DType dtype, const std::function<void(ModelFixture&)>& damage,
    void (*change)(ModelConfig&) = [](ModelConfig&) {}, const std::vector<int32_t>& bounds = {}) {
  ModelConfig config = small_model();
  change(config);
  ModelFixture f(config, 2, 45, device, dtype, 3, 0.1, {}, {}, static_cast<int64_t>(bounds.size()));
  if (!bounds.empty()) f.set_documents(bounds);
  Runtime memory({.device = device, .arena_bytes = 4096});
  Asserts asserts(memory.arena());
  f.model().watch(&asserts);
  f.loss();
  damage(f);
  asserts.clear(f.ctx());
  f.loss_and_grads();
  try {
    asserts.require_none(f.ctx(), "step 7");
  } catch (const Error& e) { return e.what(); }
  return "";
}

void set_weight(ModelFixture& f, const std::string& name, int64_t element, float value) {
  for (int64_t i = 0; i < f.model().params().count(); ++i)
    if (f.model().params().specs()[static_cast<size_t>(i)].name == name)
      f.parameters()[static_cast<size_t>(f.model().params().offset(i) + element)] = value;
  f.upload();
}

void expect(const std::string& message, const std::string& expected) {
  INFO(message);
  CHECK(message.find(expected) != std::string::npos);
}

void check_asserts(Device device, DType dtype) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  CHECK(found(device, dtype, [](ModelFixture&) {}) == "");
  // A NaN in one layer: the message names the first invalid element, here (0, 3) in mlp_pre [90,80].
  expect(found(device, dtype, [&](ModelFixture& f) { set_weight(f, "blocks.1.mlp.fc1.weight", 3 * 20, kNan); }),
         "step 7: runtime.asserts: forward of layer 1: rmsnorm, first mlp matrix: mlp_pre[0,3] of [90,80] is NaN");
  expect(found(device, dtype, [&](ModelFixture& f) { set_weight(f, "blocks.0.norm2.weight", 5, kInf); }),
         "forward of layer 0: rmsnorm, first mlp matrix: mlp_pre[0,0] of [90,80] is");
  expect(found(device, dtype, [&](ModelFixture& f) { set_weight(f, "blocks.1.attn.gate.fc2.bias", 2, kNan); }),
         "forward of layer 1: nsa_gate: gate[0,0,0,0] of [3,2,45,2] is NaN");
  expect(found(device, dtype, [&](ModelFixture& f) { set_weight(f, "blocks.0.attn.k_cmp_proj.weight", 0, kNan); }),
         "forward of layer 0: rmsnorm, q, k and v projections, rope: qkv[0,36] of");

  expect(found(device, dtype, [&](ModelFixture& f) { set_weight(f, "lm_head.weight", 0, kNan); }),
         "final norm, head, cross-entropy: row_loss[0] of [90] is");
  // Returns the message after replacing, in layer 1, one token's list in sequence 1, group 1. Lists are [2,45,2,4].
  const auto with_list = [&](std::vector<int32_t> list, int64_t token) {
    return found(device, dtype, [&](ModelFixture& f) {
      std::vector<int32_t> all = f.lists(1);
      std::copy(list.begin(), list.end(), all.begin() + ((45 + token) * 2 + 1) * 4);
      f.set_lists(0, f.lists(0));
      f.set_lists(1, all);
    });
  };
  const std::string lists = "forward of layer 1: nsa_select: block_index";
  CHECK(with_list({0, 2, 4, 5}, 44) == "");
  CHECK(with_list({0, 5, -1, -1}, 44) == "");
  expect(with_list({0, 4, 4, 5}, 44), lists + "[1,44,1,2] of [2,45,2,4] is not above the entry before it");
  expect(with_list({0, 5, 4, -1}, 44), lists + "[1,44,1,2] of [2,45,2,4] is not above the entry before it");
  expect(with_list({0, -1, 4, 5}, 44), lists + "[1,44,1,2] of [2,45,2,4] is not above the entry before it");
  expect(with_list({0, 1, 3, -1}, 23), lists + "[1,23,1,2] of [2,45,2,4] is a block that begins after its token");
  CHECK(with_list({0, 1, 3, -1}, 24) == "");
  expect(with_list({-2, 0, 4, 5}, 44), lists + "[1,44,1,0] of [2,45,2,4] is a block that does not exist");
  // An invalid token is reported; the pass itself uses token 0 instead.
  const auto with_token = [&](int32_t value, bool target) {
    return found(device, dtype, [&](ModelFixture& f) {
      const Tensor ids = target ? f.activations().targets : f.activations().tokens;
      std::vector<int32_t> host(static_cast<size_t>(ids.numel()));
      read(f.ctx(), host.data(), ids);
      host[45 + 7] = value;
      write(f.ctx(), ids, host.data());
    });
  };
  expect(with_token(37, false), "forward: the loader: tokens[1,7] of [2,45] is out of range");
  expect(with_token(-1, false), "forward: the loader: tokens[1,7] of [2,45] is out of range");
  expect(with_token(-2, true), "forward: the loader: targets[1,7] of [2,45] is out of range");
  CHECK(with_token(-1, true) == "");
  CHECK(with_token(36, false) == "");
  // Dense attention has its own asserts.
  expect(found(
             device, dtype, [&](ModelFixture& f) { set_weight(f, "blocks.1.attn.v_win_proj.weight", 0, kNan); },
             [](ModelConfig& c) { c.attention = AttentionKind::dense; }),
         "forward of layer 1: rmsnorm, q, k and v projections, rope: qkv[0,48]");
  // With qk_norm q and k are checked before and after the norm. In qkv [90,102], element 36 is k_cmp's first bias; in
  // qk [90,72], k_cmp's group 1 begins at column 42.
  const auto qkv = [](ModelConfig& c) { c.qkv_bias = c.qk_norm = true; };
  CHECK(found(
            device, dtype, [](ModelFixture&) {}, qkv) == "");
  expect(found(
             device, dtype, [&](ModelFixture& f) { set_weight(f, "blocks.1.attn.k_cmp_proj.bias", 0, kNan); }, qkv),
         "forward of layer 1: rmsnorm, q, k and v projections: qkv[0,36] of [90,102] is NaN");
  expect(found(
             device, dtype, [&](ModelFixture& f) { set_weight(f, "blocks.0.attn.k_cmp_norm.weight", 1, kInf); }, qkv),
         "forward of layer 0: qk_norm, rope: qk[0,37] of [90,72] is");
}

// In packed rows a list may name only blocks in its token's document. Ids: row 1's documents begin at its tokens 0, 20
// and 21, and their first blocks are 0, floor(20 / 8) + 1 = 3 and floor(21 / 8) + 2 = 4.
void check_asserts_of_documents(Device device, DType dtype) {
  const std::vector<int32_t> bounds = {0, 45, 65, 66, 90};
  const auto with_list = [&](std::vector<int32_t> list, int64_t token) {
    return found(
        device, dtype,
        [&](ModelFixture& f) {
          std::vector<int32_t> all = f.lists(1);
          std::copy(list.begin(), list.end(), all.begin() + ((45 + token) * 2 + 1) * 4);
          f.set_lists(0, f.lists(0));
          f.set_lists(1, all);
        },
        [](ModelConfig&) {}, bounds);
  };
  const std::string at = "forward of layer 1: nsa_select: block_index";
  CHECK(with_list({4, 5, 6, -1}, 44) == "");
  CHECK(with_list({0, 1, 2, -1}, 19) == "");
  CHECK(with_list({3, -1, -1, -1}, 20) == "");
  expect(with_list({2, 4, 5, 6}, 44), at + "[1,44,1,0] of [2,45,2,4] is a block that does not exist in its document");
  expect(with_list({3, 4, 5, 6}, 44), at + "[1,44,1,0] of [2,45,2,4] is a block that does not exist in its document");
  expect(with_list({0, 1, 2, 3}, 19), at + "[1,19,1,3] of [2,45,2,4] is a block that does not exist in its document");
  expect(with_list({3, 4, -1, -1}, 20), at + "[1,20,1,1] of [2,45,2,4] is a block that does not exist in its document");
  expect(with_list({4, 5, 6, -1}, 36), at + "[1,36,1,2] of [2,45,2,4] is a block that begins after its token");
  expect(with_list({4, 6, 5, -1}, 44), at + "[1,44,1,2] of [2,45,2,4] is not above the entry before it");
}

}  // namespace

TEST_CASE("asserts: a list that names another document's block is found", "[ablation][documents]") {
  for (const DType dtype : {DType::f32, DType::bf16}) check_asserts_of_documents(Device::cpu(), dtype);
}

TEST_CASE("asserts: a list that names another document's block is found on the GPU", "[ablation][documents][gpu]") {
  if (!require_gpu()) return;
  for (const DType dtype : {DType::f32, DType::bf16}) check_asserts_of_documents(Device::cuda(), dtype);
}

TEST_CASE("ablation: a forced branch leaves the other branches' parameters without a gradient", "[ablation]") {
  check_forced(Device::cpu(), DType::f64);
}

TEST_CASE("ablation: a forced branch leaves the other branches' parameters without a gradient on the GPU",
          "[ablation][gpu]") {
  if (!require_gpu()) return;
  check_forced(Device::cuda(), DType::f32);
  check_forced(Device::cuda(), DType::bf16);
}

TEST_CASE("ablation: gates are one-hot if forced, uniform if configured, and otherwise unchanged", "[ablation]") {
  check_gates(Device::cpu(), DType::f64);
}

TEST_CASE("ablation: gates are one-hot if forced, uniform if configured, and otherwise unchanged on the GPU",
          "[ablation][gpu]") {
  if (require_gpu()) check_gates(Device::cuda(), DType::bf16);
}

TEST_CASE("ablation: stopgrad_gates gives the gradient of constant gates", "[ablation]") {
  check_stopgrad_against_constant_gates(Device::cpu(), DType::f64);
}

TEST_CASE("ablation: stopgrad_gates gives the gradient of constant gates on the GPU", "[ablation][gpu]") {
  if (require_gpu()) check_stopgrad_against_constant_gates(Device::cuda(), DType::f32);
}

TEST_CASE("ablation: the window branch alone, with w >= T, is dense attention", "[ablation]") {
  ModelConfig config = small_model();
  config.nsa.gate.force = Branch::win, config.nsa.w = 60;
  ModelConfig dense = small_model();
  dense.attention = AttentionKind::dense;
  ModelFixture f(config, 1, 50, Device::cpu(), DType::f64), g(dense, 1, 50, Device::cpu(), DType::f64);
  // Copies the dense model's parameters, by name, from the NSA model.
  const Params &from = f.model().params(), &to = g.model().params();
  for (int64_t i = 0; i < to.count(); ++i)
    for (int64_t j = 0; j < from.count(); ++j)
      if (from.specs()[static_cast<size_t>(j)].name == to.specs()[static_cast<size_t>(i)].name)
        std::copy_n(f.parameters().begin() + from.offset(j), to.specs()[static_cast<size_t>(i)].shape.numel(),
                    g.parameters().begin() + to.offset(i));
  g.upload();
  CHECK(f.loss() == Approx(g.loss()).epsilon(1e-12));
}

TEST_CASE("asserts: the error names pass, layer, op and element of the first invalid value", "[asserts]") {
  check_asserts(Device::cpu(), DType::f32);
}

TEST_CASE("asserts: the error names the first invalid value on the GPU", "[asserts][gpu]") {
  if (require_gpu()) check_asserts(Device::cuda(), DType::bf16);
}

TEST_CASE("asserts: a violation is described after passes of the other kind", "[asserts]") {
  Runtime runtime({.device = Device::cpu(), .arena_bytes = 4096});
  Context& ctx = runtime.ctx();
  Asserts asserts(runtime.arena());
  const Tensor good = runtime.arena().alloc(MemTag::io, "good", DType::f32, {3}),
               bad = runtime.arena().alloc(MemTag::io, "bad", DType::f32, {2});
  zero(ctx, good), zero(ctx, bad);
  bad.ptr<float>()[1] = NAN;
  for (const bool dense : {false, true}) {
    const auto pass = [&](bool is_dense, const char* name, const Tensor& x) {
      asserts.begin_pass(is_dense);
      asserts.finite(ctx, is_dense, {{"op", name, x}});
    };
    asserts.clear(ctx);
    pass(dense, dense ? "of dense" : "of nsa", bad);
    const int64_t key = *asserts.first().ptr<int64_t>();
    pass(!dense, "of the other", good);
    CHECK(asserts.describe(key) ==
          fmt::format("forward of layer {}: op: {}[1] of [2] is NaN", dense ? 1 : 0, dense ? "of dense" : "of nsa"));
  }
}

TEST_CASE("asserts: invalid elements are found at any index, and the lowest index is reported", "[asserts]") {
  for (const bool gpu : {false, true}) {
    if (gpu && backend::cuda_device_count() == 0) continue;
    const Device device = gpu ? Device::cuda() : Device::cpu();
    Runtime runtime({.device = device, .arena_bytes = 8 << 20});
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int64_t n : {1, 7, 8, 1000, 16385, 500003}) {
        Scratch::Scope scope(runtime.scratch());
        const Tensor x = runtime.arena().alloc(MemTag::io, "x", dtype, {n}),
                     first = runtime.arena().alloc(MemTag::io, "first", DType::i64, {1});
        std::vector<uint16_t> half(static_cast<size_t>(n), 0x3f80);
        std::vector<float> full(static_cast<size_t>(n), 1.0f);
        const int64_t bad[] = {n - 1, n / 2};
        int64_t seen = kNoViolation;
        for (const int64_t at : {int64_t{-1}, bad[0], bad[1]}) {
          if (at >= 0) half[static_cast<size_t>(at)] = 0xff80, full[static_cast<size_t>(at)] = -INFINITY;
          write(runtime.ctx(), x, dtype == DType::f32 ? static_cast<const void*>(full.data()) : half.data());
          write(runtime.ctx(), first, &kNoViolation);
          assert_finite(runtime.ctx(), first, 5, x);
          read(runtime.ctx(), &seen, first);
          INFO(n << " " << name_of(dtype) << " " << at);
          CHECK(seen == (at < 0 ? kNoViolation : Violation::key(5, at, Violation::minus_infinity)));
        }
      }
  }
}

TEST_CASE("asserts: NSA_STRICT_ASSERTS ends a run at the first activation that is not finite", "[asserts]") {
  const TemporaryFolder folder;
  const std::string args = "train " + kTiny + " --set runtime.device=cpu --set train.lr=1e30 --set log.out_dir=";
  const Outcome without = run_program(args + folder.file("a"));
  CHECK(without.output.find("runtime.asserts: ") == std::string::npos);
  const Outcome with = run_program(args + folder.file("b"), "NSA_STRICT_ASSERTS=1");
  INFO(with.output);
  CHECK(with.exit_code == 1);
  CHECK(with.output.find("step 2: runtime.asserts: ") != std::string::npos);
  CHECK(Json::parse(read_text(folder.file("b/config.json")))["runtime"]["asserts"] == true);
  // Asserts don't change a healthy run's results.
  const std::string healthy = "train " + kTiny + " --set runtime.device=cpu --set train.steps=3 --set log.out_dir=";
  REQUIRE(run_program(healthy + folder.file("c") + " --set train.eval_every=2", "NSA_STRICT_ASSERTS=1").exit_code == 0);
  REQUIRE(run_program(healthy + folder.file("d") + " --set train.eval_every=2").exit_code == 0);
  CHECK(read_text(folder.file("c/model.safetensors")) == read_text(folder.file("d/model.safetensors")));
}

// Sets one tensor element in a checkpoint's weights to NaN, and removes the checksums, which would reveal the change.
void poison(const std::string& path, const std::string& tensor, int64_t element) {
  std::string bytes = read_text(path);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  Json header = Json::parse(bytes.substr(sizeof length, length));
  std::string data = bytes.substr(sizeof length + length);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const int64_t at = header.at(tensor)["data_offsets"][0].get<int64_t>() + 4 * element;
  std::memcpy(data.data() + at, &nan, sizeof nan);
  header.erase("__metadata__");
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  length = text.size();
  write_text(path, std::string(reinterpret_cast<const char*>(&length), sizeof length) + text + data);
}

TEST_CASE("asserts: a NaN in one layer of a run is named by layer, op and element", "[asserts]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"),
                    args = "train " + kTiny +
                           " --set runtime.device=cpu --set train.save_every=2 --set log.out_dir=" + out;
  REQUIRE(run_program(args + " --set train.steps=2").exit_code == 0);
  const std::string from = out + "/checkpoints/step_2";
  poison(from + "/model.safetensors", "blocks.1.mlp.fc1.weight", 3 * 32 + 7);  // the tensor is [128,32]
  const Outcome named = run_program(args + " --set train.steps=4 --set runtime.asserts=true --resume " + from);
  INFO(named.output);
  CHECK(named.exit_code == 1);
  CHECK(named.output.find("step 3: runtime.asserts: forward of layer 1: rmsnorm, first mlp matrix: mlp_pre[0,3] of "
                          "[96,128] is NaN") != std::string::npos);
  const Outcome seen = run_program(args + " --set train.steps=4 --resume " + from);
  INFO(seen.output);
  CHECK(seen.exit_code == 1);
  CHECK(seen.output.find("step 3: rank 0: loss ") != std::string::npos);
  CHECK(seen.output.find("nan are not both finite") != std::string::npos);
}

TEST_CASE("ablation: NSA_FORCE_BRANCH, NSA_FORCE_UNIFORM_GATE and NSA_STOPGRAD_GATES change what a run computes",
          "[ablation]") {
  const TemporaryFolder folder;
  const auto trained = [&](const std::string& name, const std::string& environment) {
    const std::string out = folder.file(name);
    const Outcome outcome = run_program("train " + kTiny +
                                            " --set runtime.device=cpu --set train.steps=3 --set log.every=1"
                                            " --set train.lr=0.01 --set train.warmup_steps=0 --set log.out_dir=" +
                                            out,
                                        environment);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return std::pair{Json::parse(read_text(out + "/config.json"))["nsa"], read_text(out + "/training.csv")};
  };
  const auto losses = [](const std::string& csv) {  // losses in steps 1 to 3
    std::vector<std::string> out;
    std::istringstream in(csv);
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) out.push_back(line.substr(line.find(',') + 1, line.find(',', 2) - 2));
    return out;
  };
  const auto baseline = losses(trained("baseline", "").second);
  REQUIRE(baseline.size() == 3);
  for (const std::string branch : {"cmp", "sel", "win"}) {
    const auto [nsa, csv] = trained(branch, "NSA_FORCE_BRANCH=" + branch);
    CHECK(nsa["force_branch"] == branch);
    CHECK(losses(csv)[0] != baseline[0]);
  }
  const auto [uniform, uniform_csv] = trained("uniform", "NSA_FORCE_UNIFORM_GATE=1");
  CHECK(uniform["uniform_gate"] == true);
  CHECK(losses(uniform_csv)[0] == baseline[0]);  // initial gates are 1/3 each; training changes them
  CHECK(losses(uniform_csv)[2] != baseline[2]);
  const auto [stopped, stopped_csv] = trained("stopped", "NSA_STOPGRAD_GATES=1");
  CHECK(stopped["stopgrad_gates"] == true);
  CHECK(losses(stopped_csv) == losses(uniform_csv));  // gates without a gradient keep their initial values
  CHECK(trained("off", "NSA_FORCE_UNIFORM_GATE=0 NSA_STOPGRAD_GATES=false NSA_FORCE_BRANCH=none").second.size() > 0);
  for (const char* bad : {"NSA_FORCE_BRANCH=best", "NSA_FORCE_UNIFORM_GATE=2", "NSA_STOPGRAD_GATES=yes",
                          "NSA_FORCE_BRANCH=sel NSA_FORCE_UNIFORM_GATE=1", "NSA_STRICT_ASSERTS=2"}) {
    const Outcome outcome = run_program("train " + kTiny + " --set log.out_dir=" + folder.file("bad"), bad);
    INFO(bad << "\n" << outcome.output);
    CHECK(outcome.exit_code == 2);
  }
}
