// triad_nsa_forward and triad_nsa_backward: NSA's composition (nsa/compose.h) with the caller's gates, and with
// averages or the caller's compressed keys and values.
#include <algorithm>

#include "kernels/library/library.h"
#include "kernels/library/outputs.h"
#include "kernels/library/scale.h"
#include "kernels/nsa/compose.h"
#include "kernels/nsa/gate_factors.h"

namespace triad::library {

namespace {

const std::array<const char*, 3> kKeyNames = {"k[0]", "k[1]", "k[2]"}, kValueNames = {"v[0]", "v[1]", "v[2]"};

bool present(const triad_nsa_tensor& t) { return t.rank != 0; }

// The arguments that forward and backward have in common, checked.
struct Inputs {
  int64_t B, T, Hq, Hkv, dk, dv, Tc, gates;  // gates: number per token, Hkv or Hq
  DType type, acc;
  ConstTensor q, k_cmp, v_cmp, gate;  // k_cmp, v_cmp: only if learned; gate: absent if all are 1/3
  std::array<ConstTensor, 3> k, v;    // one per branch; if shared, all three are the same tensor
  bool shared_k, shared_v, learned;   // learned: the caller gives k_cmp and v_cmp
  const triad_nsa_documents* documents;
};

// Reads k or v for the three branches. shared: set to true if one tensor serves all. learned: the caller gives
// compressed keys and values; then the first tensor is needed only if it is shared.
std::array<ConstTensor, 3> read_branches(const Call& call, const std::array<const char*, 3>& names,
                                         const triad_nsa_tensor (&from)[3], bool learned, bool& shared) {
  if (present(from[1]) != present(from[2]))
    reject(TRIAD_NSA_ERROR_ARGUMENT, "{} is present and {} is absent: both or neither", names[present(from[1]) ? 1 : 2],
           names[present(from[1]) ? 2 : 1]);
  shared = !present(from[1]);
  std::array<ConstTensor, 3> to;
  if (present(from[0]) || shared || !learned) to[0] = call.tensor(names[0], from[0], 4);
  for (int i = 1; i < 3; ++i) to[i] = shared ? to[0] : call.tensor(names[i], from[i], 4);
  return to;
}

Inputs read_inputs(const Call& call, const triad_nsa_inputs* from) {
  Inputs n{};
  n.q = call.tensor("q", from->q, 4);
  call.expect_element("q", n.q);
  n.type = n.q.dtype, n.acc = acc_dtype(n.type);
  if (present(from->k_cmp) != present(from->v_cmp))
    reject(TRIAD_NSA_ERROR_ARGUMENT, "{}: both or neither",
           present(from->k_cmp) ? "k_cmp is present and v_cmp is absent" : "v_cmp is present and k_cmp is absent");
  n.learned = present(from->k_cmp);
  n.k = read_branches(call, kKeyNames, from->k, n.learned, n.shared_k);
  n.v = read_branches(call, kValueNames, from->v, n.learned, n.shared_v);
  n.B = n.q.size(0), n.T = n.q.size(1), n.Hq = n.q.size(2), n.dk = n.q.size(3);
  n.Hkv = n.k[1].size(2), n.dv = n.v[1].size(3);
  if (n.Hkv < 1 || n.Hq < 1 || n.Hq % n.Hkv != 0)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "q has {} heads, no multiple of the {} groups of k", n.Hq, n.Hkv);
  if (n.dk < 1 || n.dv < 1)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "q is {} and v {}: heads need a width", n.q.str(), n.v[1].str());
  call.expect_count(n.B, n.T, n.Hq, 3 * std::max(n.dk, n.dv));
  call.expect_count(n.B, n.T, n.Hkv, call.options.n_sel);
  for (int i = 0; i < 3; ++i) {
    if (!n.k[i].empty()) call.expect(kKeyNames[n.shared_k ? 0 : i], n.k[i], {n.B, n.T, n.Hkv, n.dk}, n.type);
    if (!n.v[i].empty()) call.expect(kValueNames[n.shared_v ? 0 : i], n.v[i], {n.B, n.T, n.Hkv, n.dv}, n.type);
  }
  n.Tc = compressed_length(n.T, call.options.l, call.options.d);
  if (n.learned) {
    n.k_cmp = call.tensor("k_cmp", from->k_cmp, 4), n.v_cmp = call.tensor("v_cmp", from->v_cmp, 4);
    call.expect("k_cmp", n.k_cmp, {n.B, n.Tc, n.Hkv, n.dk}, n.type);
    call.expect("v_cmp", n.v_cmp, {n.B, n.Tc, n.Hkv, n.dv}, n.type);
  }
  n.gates = n.Hkv;
  if (present(from->gate)) {
    n.gate = call.tensor("gate", from->gate, 4, Call::Strides::any);
    n.gates = n.gate.size(2);
    if (n.gates != n.Hkv && n.gates != n.Hq)
      reject(TRIAD_NSA_ERROR_ARGUMENT, "gate is {}: its third axis has to be the {} groups or the {} query heads",
             n.gate.str(), n.Hkv, n.Hq);
    call.expect("gate", n.gate, {n.B, n.T, n.gates, 3}, n.type, n.acc);
  }
  n.documents = &from->documents;
  return n;
}

// The streams for q's row count, tokens times heads. From kAll on, kernels run for longer than the host takes to queue
// them. Below kSides side-stream events take longer than the kernels could overlap; backward, which has more kernels
// and overlaps more of them, needs fewer rows for side streams. From kLong q elements on, every forward kernel fills
// all SMs for many waves, and overlap saves less than 1% (tests/baselines/findings/attention.md).
Streams streams_for(const triad_nsa_tensor& q, bool is_backward) {
  constexpr double kAll = 1 << 17, kSides = 1 << 15, kSidesBackward = 1 << 13, kLong = 1 << 26;
  const double rows = static_cast<double>(q.size[0]) * static_cast<double>(q.size[1]) * static_cast<double>(q.size[2]);
  if (!is_backward && rows * static_cast<double>(q.size[3]) >= kLong) return Streams::one;
  if (rows >= kAll) return Streams::all;
  return rows >= (is_backward ? kSidesBackward : kSides) ? Streams::sides : Streams::one;
}

Key key_of(const char* function, const triad_nsa_options& options, const triad_nsa_inputs& in) {
  Key key(function);
  key.add(options).add(in.q).add(in.k_cmp).add(in.v_cmp).add(in.gate).add(&in.documents);
  for (int i = 0; i < 3; ++i) key.add(in.k[i]).add(in.v[i]);
  return key;
}

NsaComposition composition(const Options& options) {
  NsaComposition c{options};
  c.w = options.w, c.signed_gates = options.signed_gates, c.keep_block_index = options.given_lists;
  return c;
}

// Returns tensors at `from`'s addresses. Where an address is NULL, forward (required = false) has the tensor in
// scratch; in backward this is an error.
NsaSaved read_saved(const Call& call, const Inputs& n, const triad_nsa_saved* from, Scratch::Scope& scope,
                    bool required) {
  const triad_nsa_saved none{};
  if (from == nullptr && required) reject(TRIAD_NSA_ERROR_ARGUMENT, "saved is NULL");
  const triad_nsa_saved& s = from == nullptr ? none : *from;
  const auto at = [&](const std::string& name, void* address, DType dtype, const Shape& shape) {
    if (required && address == nullptr && shape.numel() > 0 && !call.planning())
      reject(TRIAD_NSA_ERROR_ARGUMENT, "saved.{} is NULL", name);
    if (required && address == nullptr)
      return Tensor(reinterpret_cast<std::byte*>(uintptr_t{4096}), dtype, shape, call.ctx.device);
    return call.at("saved." + name, address, dtype, shape, scope);
  };
  NsaSaved to;
  for (int i = 0; i < 3; ++i) {
    to.o[i] = at("o[" + std::to_string(i) + "]", s.o[i], n.type, {n.B, n.T, n.Hq, n.dv});
    to.lse[i] = at("lse[" + std::to_string(i) + "]", s.lse[i], n.acc, {n.B, n.T, n.Hq});
  }
  to.block_index = at("block_index", s.block_index, DType::i32, {n.B, n.T, n.Hkv, call.options.n_sel});
  if (!n.learned) {
    to.k_cmp = at("k_cmp", s.k_cmp, n.type, {n.B, n.Tc, n.Hkv, n.dk});
    to.v_cmp = at("v_cmp", s.v_cmp, n.type, {n.B, n.Tc, n.Hkv, n.dv});
  } else {  // read only: nothing writes them, because the step `compress` does nothing
    const auto given = [](const ConstTensor& from_caller) {
      Tensor t(const_cast<std::byte*>(from_caller.data), from_caller.dtype, from_caller.shape(), from_caller.device);
      t.stride = from_caller.stride;
      return t;
    };
    to.k_cmp = given(n.k_cmp), to.v_cmp = given(n.v_cmp);
  }
  return to;
}

void forward(Call& call, const triad_nsa_inputs* inputs, const triad_nsa_tensor* out_from,
             const triad_nsa_saved* saved_to) {
  Context& ctx = call.ctx;
  const Inputs n = read_inputs(call, inputs);
  const Tensor out = call.tensor("out", out_from, 4, Call::Strides::heads, true);
  call.expect("out", out, {n.B, n.T, n.Hq, n.dv}, n.type);
  const bool no_lists = saved_to == nullptr || (saved_to->block_index == nullptr && !call.planning());
  if (call.options.given_lists && no_lists && out.numel() > 0)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "saved.block_index is NULL, and options.flags has TRIAD_NSA_GIVEN_LISTS");
  Scratch::Scope scope(ctx.scratch);
  NsaSaved s = read_saved(call, n, saved_to, scope, false);
  s.gate = scope.alloc(n.acc, {3, n.B, n.T, n.gates});
  if (out.numel() == 0) return;
  NsaIn in{scaled(call, n.q, scope), n.k, n.v, call.documents(n.documents, n.B, n.T, scope)};
  const NsaComposition c = composition(call.options);
  NsaForwardSteps steps;
  if (n.learned) {
    steps.gate = [&](Context& on) { nsa_gate_factors_forward(on, s.gate, n.gate); };
    steps.compress = [](Context&) {};
  } else {
    steps.compress = [&](Context& on) {
      nsa_averages_and_gates(on, {s.k_cmp, s.v_cmp}, {n.k[0], n.v[0]}, c, s.gate, n.gate, in.documents);
    };
  }
  nsa_compose_forward(ctx, out, s, in, c, steps);
}

// The gradients that the caller wants, checked; absent ones are empty().
struct Wanted {
  Tensor q, k_cmp, v_cmp, gate;
  std::array<Tensor, 3> k, v;
};

Wanted read_wanted(const Call& call, const Inputs& n, const triad_nsa_gradients* from) {
  const auto read = [&](const std::string& name, const triad_nsa_tensor& t, const Shape& shape,
                        Call::Strides strides = Call::Strides::heads) {
    if (!present(t)) return Tensor{};
    const Tensor to = call.tensor("gradients." + name, t, 4, strides, true);
    call.expect("gradients." + name, to, shape, n.type, n.acc);
    return to;
  };
  const auto no = [&](const std::string& name, const triad_nsa_tensor& t, const char* why) {
    if (present(t)) reject(TRIAD_NSA_ERROR_ARGUMENT, "gradients.{} is present, and {}", name, why);
  };
  Wanted w;
  w.q = read("q", from->q, n.q.shape());
  for (int i = 0; i < 3; ++i) {
    if (n.shared_k && i > 0)
      no(kKeyNames[i], from->k[i], "the branches share k[0]");
    else
      w.k[i] = read(kKeyNames[i], from->k[i], {n.B, n.T, n.Hkv, n.dk});
    if (n.shared_v && i > 0)
      no(kValueNames[i], from->v[i], "the branches share v[0]");
    else
      w.v[i] = read(kValueNames[i], from->v[i], {n.B, n.T, n.Hkv, n.dv});
  }
  if (n.learned) {
    w.k_cmp = read("k_cmp", from->k_cmp, {n.B, n.Tc, n.Hkv, n.dk});
    w.v_cmp = read("v_cmp", from->v_cmp, {n.B, n.Tc, n.Hkv, n.dv});
  } else {
    no("k_cmp", from->k_cmp, "inputs.k_cmp is absent");
    no("v_cmp", from->v_cmp, "inputs.v_cmp is absent");
  }
  if (n.gate.empty())
    no("gate", from->gate, "inputs.gate is absent");
  else
    w.gate = read("gate", from->gate, n.gate.shape(), Call::Strides::any);
  return w;
}

void backward(Call& call, const triad_nsa_inputs* inputs, const triad_nsa_saved* saved_from,
              const triad_nsa_tensor* dout_from, const triad_nsa_gradients* gradients) {
  Context& ctx = call.ctx;
  const Inputs n = read_inputs(call, inputs);
  const Tensor dout = call.tensor("dout", dout_from, 4);
  call.expect("dout", dout, {n.B, n.T, n.Hq, n.dv}, n.type);
  const Wanted wanted = read_wanted(call, n, gradients);
  Scratch::Scope scope(ctx.scratch);
  NsaSaved s = read_saved(call, n, saved_from, scope, true);
  s.gate = scope.alloc(n.acc, {3, n.B, n.T, n.gates});
  if (n.B * n.T == 0) return;

  const double factor = call.options.factor(n.dk);
  NsaIn in{scaled(call, n.q, scope), n.k, n.v, call.documents(n.documents, n.B, n.T, scope)};
  const NsaComposition c = composition(call.options);
  Outputs to(call, scope);
  NsaGrad grad;
  grad.dq = to.target_dq(wanted.q, n.acc, n.q.shape(), factor);
  const Shape k_shape{n.B, n.T, n.Hkv, n.dk}, v_shape{n.B, n.T, n.Hkv, n.dv};
  if (n.shared_k) grad.k = to.shared(wanted.k[0], n.type, k_shape, n.learned);
  if (n.shared_v) grad.v = to.shared(wanted.v[0], n.type, v_shape, n.learned);
  for (int i = 1; i < 3; ++i) {  // a branch's dk and dv have one dtype
    const auto is_acc = [&](const Tensor& t) { return !t.empty() && t.dtype == n.acc; };
    const bool acc = (is_acc(wanted.k[i]) || is_acc(wanted.v[i])) && !n.shared_k && !n.shared_v;
    if (!n.shared_k) grad.k[i] = to.target(wanted.k[i], acc ? n.acc : n.type, k_shape);
    if (!n.shared_v) grad.v[i] = to.target(wanted.v[i], acc ? n.acc : n.type, v_shape);
  }
  const bool own_k = !n.shared_k && !wanted.k[0].empty(), own_v = !n.shared_v && !wanted.v[0].empty();
  if (own_k && !n.learned) grad.k[0] = to.target(wanted.k[0], n.type, k_shape);
  if (own_v && !n.learned) grad.v[0] = to.target(wanted.v[0], n.type, v_shape);

  nsa_gate_factors_forward(ctx, s.gate, n.gate);
  const auto compress = [&](Context& on, ConstTensor dk_cmp, ConstTensor dv_cmp) {
    if (n.learned) {
      if (!wanted.k_cmp.empty()) scale(on, wanted.k_cmp, dk_cmp, 1);
      if (!wanted.v_cmp.empty()) scale(on, wanted.v_cmp, dv_cmp, 1);
      if (own_k) zero(on, wanted.k[0]);
      if (own_v) zero(on, wanted.v[0]);
      return;
    }
    if (!grad.k[0].empty())
      nsa_compress_linear_backward(on, grad.k[0], {}, dk_cmp, n.k[0], {}, {c, Phi::avg}, in.documents);
    if (!grad.v[0].empty())
      nsa_compress_linear_backward(on, grad.v[0], {}, dv_cmp, n.v[0], {}, {c, Phi::avg}, in.documents);
  };
  const auto gate = [&](Context& on, ConstTensor dgate) {
    if (!wanted.gate.empty()) nsa_gate_factors_backward(on, wanted.gate, dgate);
  };
  nsa_compose_backward(ctx, grad, dout, in, s, c, {.gate = gate, .compress = compress});
  to.finish();
}

}  // namespace

}  // namespace triad::library

using namespace triad;
using namespace triad::library;

extern "C" {

triad_nsa_status triad_nsa_saved_bytes(triad_nsa_context* context, const triad_nsa_options* options_from,
                                       const triad_nsa_inputs* inputs, triad_nsa_saved_sizes* sizes) {
  return guarded([&] {
    if (context == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "context is NULL");
    sized("sizes", sizes);
    sized("inputs", inputs);
    const Options options = read_options(options_from);
    planned_bytes(*context, options, [&](Call& call) {
      const Inputs n = read_inputs(call, inputs);
      const auto bytes = [](DType dtype, const Shape& shape) {
        return static_cast<size_t>(shape.numel() * size_of(dtype));
      };
      sizes->compressed = n.Tc;
      sizes->o = bytes(n.type, {n.B, n.T, n.Hq, n.dv});
      sizes->lse = bytes(n.acc, {n.B, n.T, n.Hq});
      sizes->block_index = bytes(DType::i32, {n.B, n.T, n.Hkv, options.n_sel});
      sizes->k_cmp = n.learned ? 0 : bytes(n.type, {n.B, n.Tc, n.Hkv, n.dk});
      sizes->v_cmp = n.learned ? 0 : bytes(n.type, {n.B, n.Tc, n.Hkv, n.dv});
    });
  });
}

triad_nsa_status triad_nsa_forward(triad_nsa_context* context, void* stream, const triad_nsa_options* options_from,
                                   const triad_nsa_inputs* inputs, const triad_nsa_tensor* out,
                                   const triad_nsa_saved* saved, void* workspace, size_t* workspace_bytes) {
  return guarded([&] {
    if (context == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "context is NULL");
    const Options options = read_options(options_from);
    Key key = key_of("forward", *options_from, sized("inputs", inputs));
    if (saved != nullptr) sized("saved", saved);
    key.add(out);
    for (int i = 0; i < 3 && saved != nullptr; ++i) key.add(saved->o[i] != nullptr).add(saved->lse[i] != nullptr);
    if (saved != nullptr)
      key.add(saved->block_index != nullptr).add(saved->k_cmp != nullptr).add(saved->v_cmp != nullptr);
    run(
        context, stream, options, key, workspace, workspace_bytes,
        [&](Call& call) { forward(call, inputs, out, saved); }, streams_for(inputs->q, /*is_backward=*/false));
  });
}

triad_nsa_status triad_nsa_backward(triad_nsa_context* context, void* stream, const triad_nsa_options* options_from,
                                    const triad_nsa_inputs* inputs, const triad_nsa_saved* saved,
                                    const triad_nsa_tensor* dout, const triad_nsa_gradients* gradients, void* workspace,
                                    size_t* workspace_bytes) {
  return guarded([&] {
    if (context == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "context is NULL");
    const Options options = read_options(options_from);
    Key key = key_of("backward", *options_from, sized("inputs", inputs));
    if (saved != nullptr) sized("saved", saved);
    sized("gradients", gradients);
    key.add(dout).add(gradients->q).add(gradients->k_cmp).add(gradients->v_cmp).add(gradients->gate);
    for (int i = 0; i < 3; ++i) key.add(gradients->k[i]).add(gradients->v[i]);
    run(
        context, stream, options, key, workspace, workspace_bytes,
        [&](Call& call) { backward(call, inputs, saved, dout, gradients); },
        streams_for(inputs->q, /*is_backward=*/true));
  });
}

}  // extern "C"
