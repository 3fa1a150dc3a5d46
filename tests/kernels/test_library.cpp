// kernels/library's C functions against the engine's own ops, central differences and each other. GPUs:
// test_library_gpu.cpp; bad arguments: test_library_errors.cpp.
#include <algorithm>

#include "kernels/nsa/compose.h"
#include "tests/support/library_problem.h"

namespace {

using namespace triad;
using namespace triad::test;

const Setting kCpu64{Device::cpu(), DType::f64};

}  // namespace

TEST_CASE("library: gradients of the whole are central differences") {
  for (const LibraryCase& n : small_cases()) {
    LibraryProblem p(kCpu64, n);
    p.forward();
    p.backward();
    const Values lists = p.lab.values(p.block_index), dout = p.lab.values(p.dout);
    const auto loss = [&] {
      p.forward();
      const Values out = p.lab.values(p.out);
      double sum = 0;
      for (size_t i = 0; i < out.size(); ++i) sum += out[i] * dout[i];
      REQUIRE(p.lab.values(p.block_index) == lists);  // the selection has no gradient, and must not change
      return sum;
    };
    for (auto& [name, t] : p.in) {
      if (t.numel() == 0) continue;
      const Values values = p.lab.values(t), gradient = p.lab.values(p.grad[name]);
      for (uint64_t direction = 0; direction < 2; ++direction) {
        INFO(n.name << ": d" << name << ", direction " << direction);
        const Values step = random_values(t.numel(), 100 + direction);
        const auto moved = [&](double by) {
          Values to = values;
          for (size_t i = 0; i < to.size(); ++i) to[i] += by * step[i];
          p.lab.assign(t, to);
          return loss();
        };
        constexpr double kStep = 2e-6;
        const double difference = (moved(kStep) - moved(-kStep)) / (2 * kStep);
        double expected = 0, size = 0;
        for (size_t i = 0; i < step.size(); ++i)
          expected += gradient[i] * step[i], size += std::abs(gradient[i] * step[i]);
        CHECK(std::abs(expected - difference) <= 1e-7 * (1 + size));
      }
      p.lab.assign(t, values);
    }
  }
}

namespace {

// NSA by the engine's nsa_forward and nsa_backward, and the same through the library, with the gates that the engine
// computed as factors: equal bits.
void check_against_engine(const Setting& setting, const Sizes& n, const NsaConfig& c) {
  INFO(n.str() << " " << name_of(setting.dtype));
  Problem e(setting, n, c);
  Lab& lab = e.lab;
  const DType T = setting.dtype, acc = acc_dtype(T);
  const NsaIn in{e.q, {e.k[0], e.k[1], e.k[2]}, {e.v[0], e.v[1], e.v[2]}};
  NsaGrad grad{lab.poisoned(e.q.shape(), acc), lab.poisoned({1, n.T, n.Hkv, n.dk}, acc), {}, {}, {}};
  for (int b = 0; b < 3; ++b) grad.k[b] = lab.poisoned(e.k[b].shape(), T), grad.v[b] = lab.poisoned(e.v[b].shape(), T);
  NsaWeightGrads dw;
  const GateWeights& gate = e.weights.gate;
  const auto zeros = [&](const ConstTensor& like) {
    return lab.from(Values(static_cast<size_t>(like.numel()), 0.0), like.shape(), acc);
  };
  dw.gate = {zeros(gate.fc1_w), zeros(gate.fc1_b), zeros(gate.fc2_w), zeros(gate.fc2_b)};

  LibraryCase library{.name = "engine", .B = 1, .T = n.T, .Hkv = n.Hkv, .G = n.G, .dk = n.dk, .dv = n.dv};
  library.options = {c.l, c.d, c.l_sel, c.n_sel, c.w};
  LibraryProblem p(setting, library);
  const auto take = [&](const std::string& name, const ConstTensor& t) {
    REQUIRE(p.in[name].shape() == t.shape());
    p.lab.assign(p.in[name], lab.values(Tensor(const_cast<std::byte*>(t.data), t.dtype, t.shape(), t.device)));
  };
  take("q", e.q);
  for (int b = 0; b < 3; ++b) take("k" + std::to_string(b), e.k[b]), take("v" + std::to_string(b), e.v[b]);
  e.forward();
  const Values planes = lab.values(e.saved.gate);
  Values factors(planes.size());
  const size_t rows = planes.size() / 3;
  for (size_t i = 0; i < planes.size(); ++i) factors[i % rows * 3 + i / rows] = planes[i];
  p.in["gate"] = p.lab.from(factors, {1, n.T, n.Hkv, 3}, acc);
  p.grad["gate"] = p.lab.poisoned({1, n.T, n.Hkv, 3}, acc);
  p.grad["q"] = p.lab.poisoned(e.q.shape(), acc);
  p.lab.assign(p.dout, random_values(p.dout.numel(), 51));
  nsa_backward(lab.ctx(), grad, dw, lab.from(lab.values(p.dout), p.dout.shape(), T), in, e.saved, e.weights, c);
  p.forward();
  p.backward();
  CHECK(p.lab.values(p.out) == lab.values(e.out));
  CHECK(p.lab.values(p.block_index) == lab.values(e.saved.block_index));
  for (int b = 0; b < 3; ++b) {
    CHECK(p.lab.values(p.o[b]) == lab.values(e.saved.o[b]));
    CHECK(p.lab.values(p.lse[b]) == lab.values(e.saved.lse[b]));
    CHECK(p.lab.values(p.grad["k" + std::to_string(b)]) == lab.values(grad.k[b]));
    CHECK(p.lab.values(p.grad["v" + std::to_string(b)]) == lab.values(grad.v[b]));
  }
  CHECK(p.lab.values(p.grad["q"]) == lab.values(grad.dq));
}

}  // namespace

TEST_CASE("library: the whole has the engine's bits") {
  check_against_engine(kCpu, {300, 2, 3, 16, 16}, config(16, 8, 32, 4, 50));
  check_against_engine(kCpu64, {90, 1, 4, 8, 8}, config(8, 4, 16, 3, 20));
}

TEST_CASE("library: the whole has the engine's bits, on a GPU") {
  on_gpu([](const Setting& setting) {
    check_against_engine(setting, {1031, 2, 6, 64, 64}, config(32, 16, 64, 8, 200));
    check_against_engine(setting, {600, 1, 16, 128, 128}, config(32, 16, 64, 4, 128));
    check_against_engine(setting, {333, 1, 4, 192, 128}, config(32, 16, 64, 4, 128));
    check_against_engine(setting, {257, 2, 2, 40, 24}, config(16, 8, 32, 4, 50));
  });
}

TEST_CASE("library: given lists are attended to, and those of the selection give its bits") {
  for (const LibraryCase& n : small_cases()) {
    INFO(n.name);
    LibraryProblem p(kCpu64, n);
    p.forward();
    p.backward();
    const auto selected = p.results();
    p.options.flags |= TRIAD_NSA_GIVEN_LISTS;
    p.forward();
    p.backward();
    CHECK(p.results() == selected);
    if (n.T < 2 * n.options[2]) continue;
    Values own = selected.at("block_index");  // each list's last block alone
    const size_t entries = static_cast<size_t>(n.options[3]);
    for (size_t i = 0; i < own.size(); i += entries) {
      const auto begin = own.begin() + static_cast<int64_t>(i), end = begin + static_cast<int64_t>(entries);
      const double last = *std::max_element(begin, end);
      std::fill(begin, end, -1);
      *begin = last;
    }
    p.lab.assign(p.block_index, own);
    p.forward();
    CHECK(p.lab.values(p.block_index) == own);
    CHECK(p.lab.values(p.out) != selected.at("out"));
    const Tensor o = p.lab.poisoned(p.o[1].shape(), DType::f64), lse = p.lab.poisoned(p.lse[1].shape(), DType::f64);
    const std::string from = n.shared ? "0" : "1";
    const triad_nsa_documents documents = p.documents();
    const triad_nsa_tensor q = c_tensor(p.in["q"]), k = c_tensor(p.in["k" + from]), v = c_tensor(p.in["v" + from]),
                           lists = c_tensor(p.block_index), to = c_tensor(o), to_lse = c_tensor(lse);
    p.call("block-sparse forward", [&](void* w, size_t* bytes) {
      return triad_nsa_block_sparse_forward(p.context.get(), nullptr, &p.options, &documents, &q, &k, &v, &lists, &to,
                                            &to_lse, w, bytes);
    });
    CHECK(p.lab.values(o) == p.lab.values(p.o[1]));
    CHECK(p.lab.values(lse) == p.lab.values(p.lse[1]));
  }
}

TEST_CASE("library: documents have the results that they have alone") {
  LibraryCase packed{.name = "packed", .B = 1, .T = 70, .Hkv = 2, .G = 2, .dk = 8, .dv = 8, .gates = Gates::per_head};
  packed.bounds = {0, 3, 33, 70};
  LibraryProblem p(kCpu64, packed);
  p.forward();
  p.backward();
  const std::map<std::string, Values> all = p.results();
  for (size_t i = 0; i + 1 < packed.bounds.size(); ++i) {
    const int64_t from = packed.bounds[i], to = packed.bounds[i + 1];
    LibraryCase one = packed;
    one.bounds.clear();
    one.T = to - from;
    LibraryProblem alone(kCpu64, one);
    const auto rows = [&](const Values& values) {  // the document's tokens
      const int64_t row = static_cast<int64_t>(values.size()) / packed.T;
      return Values(values.begin() + from * row, values.begin() + to * row);
    };
    for (auto& [name, t] : alone.in) alone.lab.assign(t, rows(p.lab.values(p.in[name])));
    alone.lab.assign(alone.dout, rows(p.lab.values(p.dout)));
    alone.forward();
    alone.backward();
    for (const auto& [name, values] : alone.results()) {
      INFO("document " << i << ", " << name);
      if (name != "block_index") CHECK(relative_error(rows(all.at(name)), values) <= 1e-12);
    }
  }
}

TEST_CASE("library: learned compression with the averages gives what averages give") {
  for (const bool packed : {false, true}) {
    LibraryCase n{.name = "averages", .B = 1, .T = 70, .Hkv = 2, .G = 2, .dk = 8, .dv = 8};
    if (packed) n.bounds = {0, 3, 33, 70};
    LibraryProblem averages(kCpu64, n);
    averages.forward();
    averages.backward();
    n.learned = true;
    LibraryProblem learned(kCpu64, n);
    for (auto& [name, t] : learned.in)
      if (name != "k_cmp" && name != "v_cmp") learned.lab.assign(t, averages.lab.values(averages.in[name]));
    learned.lab.assign(learned.in["k_cmp"], averages.lab.values(averages.averages[0]));
    learned.lab.assign(learned.in["v_cmp"], averages.lab.values(averages.averages[1]));
    learned.forward();
    learned.backward();
    CHECK(learned.lab.values(learned.out) == averages.lab.values(averages.out));
    CHECK(learned.lab.values(learned.grad["q"]) == averages.lab.values(averages.grad["q"]));
    // The averages' input gradients follow from those of k_cmp and v_cmp.
    for (const std::string name : {"k", "v"}) {
      const triad_nsa_tensor dy = c_tensor(learned.grad[name + "_cmp"]);
      const Tensor dx = learned.lab.poisoned(averages.in[name + "0"].shape(), DType::f64);
      const triad_nsa_tensor to = c_tensor(dx);
      const triad_nsa_documents documents = learned.documents();
      learned.call("compress " + name, [&](void* w, size_t* bytes) {
        return triad_nsa_compress_backward(learned.context.get(), nullptr, &learned.options, &documents, &dy, &to, w,
                                           bytes);
      });
      CHECK(relative_error(learned.lab.values(dx), averages.lab.values(averages.grad[name + "0"])) <= 1e-14);
    }
  }
}

namespace {

// Compares gates per head, equal in each group, with gates per group.
void check_gates_per_head(const Setting& setting, LibraryCase n, double tolerance) {
  INFO(n.name << " " << name_of(setting.dtype));
  LibraryProblem group(setting, n);
  group.forward();
  group.backward();
  n.gates = Gates::per_head;
  LibraryProblem head(setting, n);
  for (auto& [name, t] : head.in)
    if (name != "gate") head.lab.assign(t, group.lab.values(group.in[name]));
  const Values gate = group.lab.values(group.in["gate"]);
  const size_t G = static_cast<size_t>(n.G);
  Values spread(gate.size() * G);
  for (size_t i = 0; i < spread.size(); ++i) spread[i] = gate[i / 3 / G * 3 + i % 3];
  head.lab.assign(head.in["gate"], spread);
  head.forward();
  head.backward();
  std::map<std::string, Values> head_results = head.results(), group_results = group.results();
  Values sums(gate.size());
  for (size_t i = 0; i < spread.size(); ++i) sums[i / 3 / G * 3 + i % 3] += head_results["dgate"][i];
  head_results["dgate"] = sums;
  for (const auto& [name, values] : group_results) {
    INFO(name);
    CHECK(relative_error(head_results[name], values) <= tolerance);
  }
}

const LibraryCase kGatesPerHead{.name = "70", .B = 1, .T = 70, .Hkv = 2, .G = 3, .dk = 8, .dv = 8};

}  // namespace

TEST_CASE("library: gates per head that are equal in a group give what gates per group give") {
  check_gates_per_head(kCpu64, kGatesPerHead, 1e-14);
}

TEST_CASE("library: gates per head that are equal in a group give what gates per group give, on a GPU", "[gpu]") {
  if (!require_gpu()) return;
  LibraryCase n = kGatesPerHead;
  n.options = {32, 16, 64, 4, 100};
  n.T = 400, n.dk = n.dv = 64;
  check_gates_per_head({Device::cuda(), DType::f32}, n, 1e-5);
  check_gates_per_head({Device::cuda(), DType::bf16}, n, 1.5e-2);
  n.bounds = {0, 3, 33, 400};
  n.dk = n.dv = 128;
  check_gates_per_head({Device::cuda(), DType::bf16}, n, 1.5e-2);
}

namespace {

// t's values in an equally shaped tensor whose rows are `gap` elements longer and whose axes 1 and 2 are swapped in
// memory.
Tensor spread_out(Lab& lab, const Tensor& t, int64_t gap) {
  const int64_t B = t.size(0), T = t.size(1), H = t.size(2), D = t.size(3), row = D + gap;
  Tensor to = lab.poisoned({B, H, T, row}, t.dtype);
  to.dim = {B, T, H, D};
  to.stride = {H * T * row, row, T * row, 1};
  copy(lab.ctx(), to, t);
  return to;
}
Values values_of(Lab& lab, const Tensor& strided) {
  const Tensor dense = lab.poisoned(strided.shape(), strided.dtype);
  copy(lab.ctx(), dense, strided);
  return lab.values(dense);
}

}  // namespace

TEST_CASE("library: strided tensors give the bits of contiguous ones") {
  for (LibraryCase n : small_cases()) {
    INFO(n.name);
    const Setting setting{Device::cpu(), DType::f32};
    LibraryProblem p(setting, n);
    p.forward();
    p.backward();
    const std::map<std::string, Values> expected = p.results();
    for (auto& [name, t] : p.in) t = spread_out(p.lab, t, name == "gate" ? 1 : 3);
    for (auto& [name, t] : p.grad) t = spread_out(p.lab, t, name == "gate" ? 2 : 5);
    p.out = spread_out(p.lab, p.out, 1), p.dout = spread_out(p.lab, p.dout, 2);
    p.forward();
    p.backward();
    CHECK(values_of(p.lab, p.out) == expected.at("out"));
    for (auto& [name, t] : p.grad) {
      INFO(name);
      CHECK(values_of(p.lab, t) == expected.at("d" + name));
    }
  }
}

TEST_CASE("library: gradients that are not wanted, and their types") {
  LibraryCase n = small_cases()[0];
  const Setting setting{Device::cpu(), DType::bf16};  // whose accumulator type is another
  LibraryProblem p(setting, n);
  p.forward();
  p.backward();
  const std::map<std::string, Values> expected = p.results();
  for (const auto& [name, t] : p.in) {  // one alone, in f32
    p.grad.clear();
    p.grad[name] = p.lab.poisoned(t.shape(), DType::f32);
    p.backward();
    INFO(name);
    CHECK(relative_error(p.lab.values(p.grad[name]), expected.at("d" + name)) <= 4e-3);
  }
}

TEST_CASE("library: keys and values that are not read have zero gradients") {
  LibraryCase n = small_cases()[0];
  n.learned = true;
  LibraryProblem p(kCpu, n);
  for (const char* const name : {"k0", "v0"}) {  // all NaN, which a read would spread
    const Shape shape = p.in[name[0] == 'k' ? "k1" : "v1"].shape();
    p.in[name] = p.lab.poisoned(shape, DType::f32), p.grad[name] = p.lab.poisoned(shape, DType::f32);
  }
  p.forward();
  p.backward();
  for (const auto& [name, values] : p.results()) {
    INFO(name);
    const bool unread = name == "dk0" || name == "dv0";
    CHECK(std::all_of(values.begin(), values.end(), [&](double x) { return unread ? x == 0 : std::isfinite(x); }));
  }
}

TEST_CASE("library: saved tensors that are not wanted") {
  LibraryProblem p(kCpu, small_cases()[0]);
  p.forward();
  const Values out = p.lab.values(p.out);
  const triad_nsa_inputs in = p.inputs();
  const triad_nsa_tensor to = c_tensor(p.out);
  p.lab.assign(p.out, Values(out.size(), 0.0));
  p.call("no saved", [&](void* w, size_t* bytes) {
    return triad_nsa_forward(p.context.get(), nullptr, &p.options, &in, &to, nullptr, w, bytes);
  });
  CHECK(p.lab.values(p.out) == out);
  triad_nsa_saved_sizes sizes{};
  sizes.struct_size = sizeof sizes;
  require_ok(triad_nsa_saved_bytes(p.context.get(), &p.options, &in, &sizes));
  CHECK(sizes.compressed == p.n.Tc());
  CHECK(sizes.o == static_cast<size_t>(p.o[0].bytes()));
  CHECK(sizes.lse == static_cast<size_t>(p.lse[0].bytes()));
  CHECK(sizes.block_index == static_cast<size_t>(p.block_index.bytes()));
  CHECK(sizes.k_cmp == static_cast<size_t>(p.averages[0].bytes()));
}

TEST_CASE("library: the default scale, and any other") {
  LibraryCase n = small_cases()[0];
  LibraryProblem base(kCpu64, n);
  base.forward();
  base.backward();
  n.scale = 1 / std::sqrt(static_cast<double>(n.dk));
  LibraryProblem same(kCpu64, n);
  same.forward();
  same.backward();
  CHECK(same.results() == base.results());
  n.scale *= 2;  // exactly like doubling q
  LibraryProblem twice(kCpu64, n);
  Values q = base.lab.values(base.in["q"]);
  for (double& x : q) x /= 2;
  twice.lab.assign(twice.in["q"], q);
  twice.forward();
  twice.backward();
  std::map<std::string, Values> expected = base.results();
  for (double& x : expected["dq"]) x *= 2;
  CHECK(twice.results() == expected);
}
