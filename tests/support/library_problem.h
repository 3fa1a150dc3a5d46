// NSA through the C functions in kernels/library/triad_nsa.h: random inputs, results and gradients, on any device.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/library/triad_nsa.h"
#include "tests/support/nsa_problem.h"

namespace triad::test {

enum class Gates { none, per_group, per_head };

struct LibraryCase {
  std::string name;
  int64_t B, T, Hkv, G, dk, dv;
  Gates gates = Gates::per_group;
  bool shared = false;    // the branches share k and v
  bool learned = false;   // k_cmp and v_cmp are given
  bool negative = false;  // gates with both signs
  std::vector<int32_t> bounds = {};
  double scale = 0;
  // l, d, l', n, w
  std::array<int64_t, 5> options = {8, 4, 16, 3, 12};

  int64_t Hq() const { return Hkv * G; }
  int64_t gate_heads() const { return gates == Gates::per_head ? Hq() : Hkv; }
  int64_t Tc() const { return compressed_length(T, options[0], options[1]); }
};

// Every kind of case, small enough for differences and for f64 on the CPU.
inline std::vector<LibraryCase> small_cases() {
  return {
      {.name = "2x33 apart", .B = 2, .T = 33, .Hkv = 2, .G = 2, .dk = 8, .dv = 6},
      {.name = "70 shared, per head",
       .B = 1,
       .T = 70,
       .Hkv = 2,
       .G = 3,
       .dk = 8,
       .dv = 8,
       .gates = Gates::per_head,
       .shared = true},
      {.name = "40 no gate, G 1", .B = 1, .T = 40, .Hkv = 3, .G = 1, .dk = 10, .dv = 8, .gates = Gates::none},
      {.name = "50 learned", .B = 1, .T = 50, .Hkv = 1, .G = 4, .dk = 8, .dv = 8, .learned = true},
      {.name = "2x41 learned, shared, per head",
       .B = 2,
       .T = 41,
       .Hkv = 1,
       .G = 2,
       .dk = 8,
       .dv = 8,
       .gates = Gates::per_head,
       .shared = true,
       .learned = true},
      {.name = "45 negative", .B = 1, .T = 45, .Hkv = 2, .G = 2, .dk = 8, .dv = 8, .negative = true},
      {.name = "44 negative per head, scale",
       .B = 1,
       .T = 44,
       .Hkv = 1,
       .G = 6,
       .dk = 8,
       .dv = 12,
       .gates = Gates::per_head,
       .negative = true,
       .scale = 0.5},
      {.name = "documents", .B = 1, .T = 70, .Hkv = 2, .G = 2, .dk = 8, .dv = 8, .bounds = {0, 3, 33, 70}},
      {.name = "documents, per head, shared",
       .B = 1,
       .T = 70,
       .Hkv = 1,
       .G = 2,
       .dk = 8,
       .dv = 8,
       .gates = Gates::per_head,
       .shared = true,
       .bounds = {0, 3, 33, 70}},
      {.name = "documents, learned, scale",
       .B = 1,
       .T = 70,
       .Hkv = 1,
       .G = 2,
       .dk = 8,
       .dv = 8,
       .learned = true,
       .bounds = {0, 3, 33, 70},
       .scale = 0.2},
      {.name = "5 tokens, no block", .B = 1, .T = 5, .Hkv = 1, .G = 2, .dk = 8, .dv = 8},
      {.name = "1 token, learned", .B = 1, .T = 1, .Hkv = 1, .G = 1, .dk = 4, .dv = 4, .learned = true},
  };
}

// t viewed as a C tensor; an absent tensor has rank 0.
inline triad_nsa_tensor c_tensor(const ConstTensor& t) {
  triad_nsa_tensor c{};
  c.data = const_cast<std::byte*>(t.data);
  c.dtype = t.dtype == DType::f64    ? TRIAD_NSA_F64
            : t.dtype == DType::f32  ? TRIAD_NSA_F32
            : t.dtype == DType::bf16 ? TRIAD_NSA_BF16
                                     : TRIAD_NSA_I32;
  c.rank = t.rank;
  for (int i = 0; i < t.rank; ++i) c.size[i] = t.size(i), c.stride[i] = t.stride[static_cast<size_t>(i)];
  return c;
}

// Fails the test, with the library's message, unless the status is TRIAD_NSA_OK.
inline void require_ok(triad_nsa_status status) {
  INFO(triad_nsa_status_name(status) << ": " << (status == TRIAD_NSA_OK ? "" : triad_nsa_last_error()));
  REQUIRE(status == TRIAD_NSA_OK);
}

class LibraryProblem {
 public:
  LibraryProblem(const Setting& setting, const LibraryCase& n) : n(n), lab(setting) {
    triad_nsa_context* made = nullptr;
    require_ok(triad_nsa_context_create(&made, setting.device.is_cuda() ? setting.device.index : TRIAD_NSA_CPU));
    context.reset(made);
    triad_nsa_default_options(&options);
    options.compress_length = n.options[0], options.compress_stride = n.options[1], options.block = n.options[2];
    options.selected = n.options[3], options.window = n.options[4], options.scale = n.scale;
    if (n.negative) options.flags |= TRIAD_NSA_SIGNED_GATES;
    const DType T = setting.dtype, acc = acc_dtype(T);
    const Shape keys{n.B, n.T, n.Hkv, n.dk}, values{n.B, n.T, n.Hkv, n.dv}, heads{n.B, n.T, n.Hq(), n.dv};
    add("q", {n.B, n.T, n.Hq(), n.dk});
    for (int b = 0; b < (n.shared ? 1 : 3); ++b) {
      if (b == 0 && n.learned && !n.shared) continue;  // not read
      add("k" + std::to_string(b), keys), add("v" + std::to_string(b), values);
    }
    if (n.learned) add("k_cmp", {n.B, n.Tc(), n.Hkv, n.dk}), add("v_cmp", {n.B, n.Tc(), n.Hkv, n.dv});
    if (n.gates != Gates::none) {
      const Shape shape{n.B, n.T, n.gate_heads(), 3};
      Values gate = random_values(shape.numel(), 50);
      for (double& g : gate) g = n.negative ? g / 2 : std::abs(g) / 2;
      in["gate"] = lab.from(gate, shape, T);
    }
    dout = lab.from(random_values(heads.numel(), 51), heads, T);
    out = lab.poisoned(heads, T);
    for (int b = 0; b < 3; ++b) o[b] = lab.poisoned(heads, T), lse[b] = lab.poisoned({n.B, n.T, n.Hq()}, acc);
    block_index = lab.poisoned({n.B, n.T, n.Hkv, n.options[3]}, DType::i32);
    averages[0] = lab.poisoned({n.B, n.Tc(), n.Hkv, n.dk}, T),
    averages[1] = lab.poisoned({n.B, n.Tc(), n.Hkv, n.dv}, T);
    for (const auto& [name, t] : in) grad[name] = lab.poisoned(t.shape(), T);
    if (!n.bounds.empty()) {
      bounds = lab.from(Values(n.bounds.begin(), n.bounds.end()), {static_cast<int64_t>(n.bounds.size())}, DType::i32);
    }
  }

  triad_nsa_inputs inputs() const {
    triad_nsa_inputs c{};
    c.struct_size = sizeof c;
    c.q = c_tensor(at(in, "q"));
    for (int b = 0; b < 3; ++b)
      c.k[b] = c_tensor(at(in, "k" + std::to_string(b))), c.v[b] = c_tensor(at(in, "v" + std::to_string(b)));
    c.k_cmp = c_tensor(at(in, "k_cmp")), c.v_cmp = c_tensor(at(in, "v_cmp")), c.gate = c_tensor(at(in, "gate"));
    c.documents = documents();
    return c;
  }
  triad_nsa_documents documents() const {
    if (bounds.empty()) return {};
    return {reinterpret_cast<const int32_t*>(bounds.data), bounds.size(0) - 1, 0};
  }
  triad_nsa_saved saved() const {
    triad_nsa_saved c{};
    c.struct_size = sizeof c;
    for (int b = 0; b < 3; ++b) c.o[b] = o[b].data, c.lse[b] = lse[b].data;
    c.block_index = reinterpret_cast<int32_t*>(block_index.data);
    c.k_cmp = averages[0].data, c.v_cmp = averages[1].data;
    return c;
  }
  triad_nsa_gradients gradients() const {
    triad_nsa_gradients c{};
    c.struct_size = sizeof c;
    c.q = c_tensor(at(grad, "q"));
    for (int b = 0; b < 3; ++b)
      c.k[b] = c_tensor(at(grad, "k" + std::to_string(b))), c.v[b] = c_tensor(at(grad, "v" + std::to_string(b)));
    c.k_cmp = c_tensor(at(grad, "k_cmp")), c.v_cmp = c_tensor(at(grad, "v_cmp")), c.gate = c_tensor(at(grad, "gate"));
    return c;
  }
  // Calls f(workspace, bytes) twice: for the size, then with a workspace that large, filled with NaN.
  template <class F>
  void call(const std::string& name, F&& f) {
    size_t bytes = 0;
    require_ok(f(nullptr, &bytes));
    Tensor& memory = workspaces_[name];
    if (memory.empty() || static_cast<size_t>(memory.bytes()) < bytes)
      memory = lab.poisoned({static_cast<int64_t>(bytes)}, DType::u8);
    require_ok(f(memory.data, &bytes));
  }
  void forward(void* stream) {
    const triad_nsa_inputs c = inputs();
    const triad_nsa_saved s = saved();
    const triad_nsa_tensor to = c_tensor(out);
    call("forward", [&](void* w, size_t* bytes) {
      return triad_nsa_forward(context.get(), stream, &options, &c, &to, &s, w, bytes);
    });
  }
  void backward(void* stream) {
    const triad_nsa_inputs c = inputs();
    const triad_nsa_saved s = saved();
    const triad_nsa_tensor from = c_tensor(dout);
    const triad_nsa_gradients g = gradients();
    call("backward", [&](void* w, size_t* bytes) {
      return triad_nsa_backward(context.get(), stream, &options, &c, &s, &from, &g, w, bytes);
    });
  }
  void forward() { forward(lab.ctx().stream.handle()); }
  void backward() { backward(lab.ctx().stream.handle()); }
  // Outputs and gradients by name.
  std::map<std::string, Values> results() {
    std::map<std::string, Values> all = {{"out", lab.values(out)}, {"block_index", lab.values(block_index)}};
    for (const auto& [name, t] : grad) all["d" + name] = lab.values(t);
    return all;
  }
  static ConstTensor at(const std::map<std::string, Tensor>& tensors, const std::string& name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? ConstTensor{} : ConstTensor(found->second);
  }

  const LibraryCase n;
  Lab lab;
  struct Destroy {
    void operator()(triad_nsa_context* c) const { triad_nsa_context_destroy(c); }
  };
  std::unique_ptr<triad_nsa_context, Destroy> context;
  triad_nsa_options options{};
  std::map<std::string, Tensor> in, grad;  // names: q, k0 .. k2, v0 .. v2, k_cmp, v_cmp, gate
  Tensor dout, out, block_index, bounds;
  std::array<Tensor, 3> o, lse;
  std::array<Tensor, 2> averages;

 private:
  void add(const std::string& name, const Shape& shape) {
    in[name] = lab.from(random_values(shape.numel(), in.size()), shape, lab.setting.dtype);
  }
  std::map<std::string, Tensor> workspaces_;
};

// |a - b| / |b|, 0 for two zeros.
inline double relative_error(const Values& a, const Values& b) {
  REQUIRE(a.size() == b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) difference += (a[i] - b[i]) * (a[i] - b[i]), norm += b[i] * b[i];
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

}  // namespace triad::test
