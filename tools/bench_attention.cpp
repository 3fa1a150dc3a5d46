// triad bench attention: NSA as a layer calls it (q, k and v are parts of the fused projection's rows), forward and
// backward, each branch on its own and the whole, or plain causal attention. What it is set against is a floor: the
// FLOPs and bytes that have to be, at the rates of a large matrix product and of a device copy measured in the same
// run.
//
// How fast the selected branch is depends on how alike neighbouring tokens choose, so there are three kinds of input:
//   randn  every element N(0, 1): neighbours choose as differently as they can
//   local  q and k drift along each head (attention_input.h)
//   a checkpoint: q, k and v of one of its layers, reading --text
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <functional>
#include <memory>

#include "engine/check.h"
#include "kernels/op_case_args.h"
#include "model/activations.h"
#include "model/flops.h"
#include "tools/attention_input.h"
#include "tools/bench.h"
#include "tools/options.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

struct AttentionOptions {
  std::vector<std::string> shapes = {"8x2048x12x2x64", "1x8192x64x4x128", "1x65536x12x2x64", "1x65536x64x4x128"};
  std::vector<std::string> data = {"randn"}, text;
  int64_t layer = -1;
  AttentionKind attention = AttentionKind::nsa;
  bool nondeterministic = false;
  NsaConfig nsa;
  BenchOptions common;
};

// BxTxHqxHkvxd, d also as 192v128: the widths of a query and a value head.
AttentionProblem parse_shape(const std::string& text, const AttentionOptions& o) {
  std::vector<int64_t> sizes;
  std::string digits;
  bool widths_differ = false, valid = true;
  for (const char c : text + 'x') {
    if (c >= '0' && c <= '9' && digits.size() < 9) {
      digits += c;
    } else {
      valid = valid && !digits.empty() && (c == 'x' || (c == 'v' && sizes.size() == 4));
      sizes.push_back(digits.empty() ? 0 : std::stoll(digits));
      widths_differ = widths_differ || c == 'v';
      digits.clear();
    }
  }
  valid = valid && sizes.size() == (widths_differ ? 6u : 5u);
  for (const int64_t size : sizes) valid = valid && size > 0;
  valid = valid && sizes[4] <= kMaxHeadWidth && sizes.back() <= kMaxHeadWidth;
  if (!valid)
    fail_usage("--shapes: {} is not BxTxHqxHkvxd with heads of at most 256, as 8x2048x12x2x64 or 1x4096x16x4x192v128",
               text);
  AttentionProblem p{text, sizes[0], sizes[1], {}};
  p.config.n_heads = sizes[2], p.config.n_kv_groups = sizes[3];
  p.config.d_k = sizes[4], p.config.d_v = sizes.back();
  p.config.attention = o.attention;
  p.config.nsa = o.nsa;
  p.config.resolve();
  return p;
}

// ---- the work ----

// Every tensor that a layer's attention works on, and a few for the parts alone, which the whole takes from scratch.
struct Tensors {
  Tensor qkv, dqkv, out, dout, dq, dq_group;
  NsaSaved saved;
  NsaWeights weights;
  NsaWeightGrads weight_grads;
  Tensor dk_cmp, dv_cmp, dgate, delta, quantum;
  std::vector<Tensor> drawn_weights;  // those of `weights`, to be written
};

int64_t saved_bytes(const NsaSaved& s) {
  int64_t bytes = 0;
  for (const Tensor& t :
       {s.k_cmp, s.v_cmp, s.block_index, s.gate, s.o[0], s.o[1], s.o[2], s.lse[0], s.lse[1], s.lse[2]})
    if (!t.empty()) bytes += t.bytes();
  return bytes;
}

Tensors allocate(Arena& arena, const AttentionProblem& p, DType dtype) {
  const ModelConfig& c = p.config;
  const DType acc = acc_dtype(dtype);
  const int64_t B = p.B, T = p.T, Hq = c.n_heads, Hkv = c.n_kv_groups;
  const auto alloc = [&](const char* name, DType type, const Shape& shape) {
    return arena.alloc(MemTag::activations, name, type, shape);
  };
  Tensors t;
  t.qkv = alloc("qkv", dtype, {B * T, qkv_width(c)});
  t.dqkv = alloc("dqkv", dtype, {B * T, qkv_width(c)});
  t.dout = alloc("dout", dtype, {B, T, Hq, c.d_v});
  t.dq = alloc("dq", acc, {B, T, Hq, c.d_k});
  t.delta = alloc("delta", acc, {3, B, T, Hq});
  t.quantum = alloc("quantum", acc, {B, T, Hq});
  for (int b = c.dense() ? kWin : 0; b < 3; ++b) {
    t.saved.o[b] = alloc("o", dtype, {B, T, Hq, c.d_v});
    t.saved.lse[b] = alloc("lse", acc, {B, T, Hq});
  }
  t.out = c.dense() ? t.saved.o[kWin] : alloc("out", dtype, {B, T, Hq, c.d_v});
  if (c.dense()) return t;
  const int64_t Tc = compressed_length(T, c.nsa.l, c.nsa.d);
  t.saved.k_cmp = alloc("k_cmp", dtype, {B, Tc, Hkv, c.d_k});
  t.saved.v_cmp = alloc("v_cmp", dtype, {B, Tc, Hkv, c.d_v});
  t.saved.block_index = alloc("block_index", DType::i32, {B, T, Hkv, c.nsa.n_sel});
  t.saved.gate = alloc("gate", acc, {3, B, T, Hkv});
  t.dk_cmp = alloc("dk_cmp", acc, t.saved.k_cmp.shape());
  t.dv_cmp = alloc("dv_cmp", acc, t.saved.v_cmp.shape());
  t.dq_group = alloc("dq of groups", acc, {B, T, Hkv, c.d_k});
  t.dgate = alloc("dgate", acc, t.saved.gate.shape());
  const auto weight = [&](ConstTensor& w, Tensor& dw, const Shape& shape) {
    t.drawn_weights.push_back(alloc("weight", dtype, shape));
    w = t.drawn_weights.back();
    dw = alloc("weight gradient", acc, shape);
  };
  const int64_t l = c.nsa.l;
  const auto phi = [&](PhiWeights& w, PhiGrads& dw, int64_t D) {
    if (c.nsa.phi == Phi::conv) weight(w.w, dw.w, {l, D});
    if (c.nsa.phi != Phi::mlp) return;
    weight(w.pos, dw.pos, {l, D});
    weight(w.fc1, dw.fc1, {2 * D, l * D});
    weight(w.fc2, dw.fc2, {D, 2 * D});
  };
  phi(t.weights.phi_k, t.weight_grads.phi_k, c.d_k);
  phi(t.weights.phi_v, t.weight_grads.phi_v, c.d_v);
  weight(t.weights.gate.fc1_w, t.weight_grads.gate.fc1_w, {c.d_k / 2, c.d_k});
  weight(t.weights.gate.fc1_b, t.weight_grads.gate.fc1_b, {c.d_k / 2});
  weight(t.weights.gate.fc2_w, t.weight_grads.gate.fc2_w, {3, c.d_k / 2});
  weight(t.weights.gate.fc2_b, t.weight_grads.gate.fc2_b, {3});
  return t;
}

using Work = std::function<void(Context&)>;
struct Part {
  std::string name;
  bool forward;
  double flops, bytes;
  Work work;
};

// FLOPs and bytes by the closed forms: a product of a pair is 2 FLOPs an element, forward has two, backward five; rows
// are read and written once. The whole moves less than its parts together: q, say, is read once.
class Parts {
 public:
  Parts(Device device, const AttentionProblem& p, const Tensors& t, DType dtype)
      : p_(p), c_(p.config), t_(t), element_(static_cast<double>(size_of(dtype))) {
    const QkvViews views = split_qkv(t.qkv, c_, p.B, p.T), dviews = split_qkv(t.dqkv, c_, p.B, p.T);
    in_.q = views.q;
    grad_.dq = t.dq, grad_.dq_group = t.dq_group;
    for (int b = 0; b < 3; ++b) in_.k[b] = views.k[b], in_.v[b] = views.v[b];
    grad_.k = dviews.k, grad_.v = dviews.v;
    Runtime dry({.device = device, .planning = true});
    Scratch::Scope scope(dry.scratch());
    has_quantum_ = !make_quantum(dry.ctx(), scope).empty();
    if (c_.dense())
      add_dense();
    else
      add_nsa();
  }
  const std::vector<Part>& all() const { return parts_; }

 private:
  double rows(double width) const { return static_cast<double>(p_.B * p_.T * c_.n_heads) * width; }      // of queries
  double keys(double width) const { return static_cast<double>(p_.B * p_.T * c_.n_kv_groups) * width; }  // raw ones
  double compressed(double width) const {
    return static_cast<double>(p_.B * c_.n_kv_groups * compressed_length(p_.T, c_.nsa.l, c_.nsa.d)) * width;
  }
  double dk() const { return static_cast<double>(c_.d_k); }
  double dv() const { return static_cast<double>(c_.d_v); }
  double products(double pairs, double width) const {
    return 2 * pairs * static_cast<double>(p_.B * c_.n_heads) * width;
  }
  void add(const char* name, bool forward, double flops, double bytes, Work work) {
    parts_.push_back({name, forward, flops, bytes, std::move(work)});
  }
  // A branch: pairs it attends, elements of its k and v together.
  void add_branch(const char* name, double pairs, double kv, Work forward, Work backward) {
    add(name, true, products(pairs, dk() + dv()), element_ * (rows(dk() + dv()) + kv) + rows(4), std::move(forward));
    backward_.push_back({name, false, products(pairs, 3 * dk() + 2 * dv()),
                         element_ * (rows(2 * dk() + 3 * dv()) + 2 * kv) + rows(8), std::move(backward)});
  }
  void add_nsa();
  void add_dense();
  Tensor make_quantum(Context& ctx, Scratch::Scope& scope) const {
    std::vector<QuantumBranch> branches;
    const NsaSaved& s = t_.saved;
    if (c_.dense()) {
      branches = {{in_.k[kWin], in_.v[kWin], {}, t_.delta[kWin]}};
    } else {
      branches = {{s.k_cmp, s.v_cmp, s.gate[kCmp], t_.delta[kCmp]},
                  {in_.k[kSel], in_.v[kSel], s.gate[kSel], t_.delta[kSel]},
                  {in_.k[kWin], in_.v[kWin], s.gate[kWin], t_.delta[kWin]}};
    }
    return attend_quantum(ctx, scope, t_.dq, t_.dout, in_.q, branches);
  }
  Tensor quantum() const { return has_quantum_ ? t_.quantum : Tensor{}; }

  const AttentionProblem& p_;
  const ModelConfig& c_;
  const Tensors& t_;
  double element_;
  NsaIn in_;
  NsaGrad grad_;
  bool has_quantum_ = false;
  std::vector<Part> parts_;     // each finds what it needs left behind by the ones before it
  std::vector<Part> backward_;  // the branches', to go behind what they need
};

void Parts::add_nsa() {
  const NsaConfig& n = c_.nsa;
  const PhiOptions phi{n.phi, n.l, n.d};
  const AttendedPairs pairs = attended_pairs(c_, p_.T);
  const NsaSaved& s = t_.saved;
  const auto upstream = [this](int b) {
    return AttendGradIn{t_.dout, t_.saved.gate[b], t_.delta[b], t_.saved.lse[b], quantum()};
  };
  const auto branches = [this]() -> std::array<ConstTensor, 3> {
    return {t_.saved.o[0], t_.saved.o[1], t_.saved.o[2]};
  };
  const double widths = dk() + dv();

  add("compress", true, 0, element_ * (keys(widths) + compressed(widths)), [=, this](Context& ctx) {
    nsa_compress_forward(ctx, t_.saved.k_cmp, in_.k[kCmp], t_.weights.phi_k, phi);
    nsa_compress_forward(ctx, t_.saved.v_cmp, in_.v[kCmp], t_.weights.phi_v, phi);
  });
  add_branch(
      "compressed", pairs.cmp, compressed(widths),
      [=, this](Context& ctx) {
        nsa_attend_compressed_forward(ctx, {s.o[kCmp], s.lse[kCmp]}, {in_.q, s.k_cmp, s.v_cmp}, {n.l, n.d});
      },
      [=, this](Context& ctx) {
        nsa_attend_compressed_backward(ctx, {t_.dq, t_.dk_cmp, t_.dv_cmp}, upstream(kCmp), {in_.q, s.k_cmp, s.v_cmp},
                                       {n.l, n.d});
      });
  add("select", true, products(pairs.cmp, dk()),
      element_ * (rows(dk()) + compressed(dk())) + rows(4) + keys(4.0 * static_cast<double>(n.n_sel)),
      [=, this](Context& ctx) {
        nsa_select(ctx, s.block_index, in_.q, s.k_cmp, s.lse[kCmp],
                   {n.l, n.d, n.l_sel, n.n_sel, n.init_blocks, n.local_blocks});
      });
  add_branch(
      "selected", pairs.sel, keys(widths),
      [=, this](Context& ctx) {
        nsa_attend_selected_forward(ctx, {s.o[kSel], s.lse[kSel]}, {in_.q, in_.k[kSel], in_.v[kSel]}, s.block_index,
                                    n.l_sel);
      },
      [=, this](Context& ctx) {
        nsa_attend_selected_backward(ctx, {t_.dq, grad_.k[kSel], grad_.v[kSel]}, upstream(kSel),
                                     {in_.q, in_.k[kSel], in_.v[kSel]}, s.block_index, n.l_sel);
      });
  add_branch(
      "window", pairs.win, keys(widths),
      [=, this](Context& ctx) {
        nsa_attend_window_forward(ctx, {s.o[kWin], s.lse[kWin]}, {in_.q, in_.k[kWin], in_.v[kWin]}, n.w);
      },
      [=, this](Context& ctx) {
        nsa_attend_window_backward(ctx, {t_.dq, grad_.k[kWin], grad_.v[kWin]}, upstream(kWin),
                                   {in_.q, in_.k[kWin], in_.v[kWin]}, n.w);
      });
  add("gate", true, 0, element_ * rows(dk()) + keys(12),
      [=, this](Context& ctx) { nsa_gate_forward(ctx, s.gate, in_.q, t_.weights.gate, n.gate); });
  add("combine", true, 0, element_ * rows(4 * dv()) + keys(12),
      [=, this](Context& ctx) { nsa_combine_forward(ctx, t_.out, branches(), s.gate); });
  add("nsa", true, products(pairs.cmp + pairs.sel + pairs.win, widths) + products(pairs.cmp, dk()),
      element_ * (rows(dk() + 4 * dv()) + 3 * keys(widths)) + rows(12),
      [=, this](Context& ctx) { nsa_forward(ctx, t_.out, s, in_, t_.weights, n); });

  add("combine", false, 0, element_ * rows(4 * dv()) + keys(24) + rows(12),
      [=, this](Context& ctx) { nsa_combine_backward(ctx, t_.dgate, t_.delta, t_.dout, branches(), s.gate); });
  if (has_quantum_)  // kept for the parts: a small copy, which the whole does without
    add("quantum", false, 0, element_ * (rows(dk() + dv()) + 3 * keys(widths)) + rows(12), [=, this](Context& ctx) {
      Scratch::Scope scope(ctx.scratch);
      copy(ctx, t_.quantum, make_quantum(ctx, scope));
    });
  parts_.insert(parts_.end(), backward_.begin(), backward_.end());
  add("compress", false, 0, element_ * keys(widths) + 4 * compressed(widths), [=, this](Context& ctx) {
    nsa_compress_backward(ctx, grad_.k[kCmp], t_.weight_grads.phi_k, t_.dk_cmp, in_.k[kCmp], t_.weights.phi_k, phi);
    nsa_compress_backward(ctx, grad_.v[kCmp], t_.weight_grads.phi_v, t_.dv_cmp, in_.v[kCmp], t_.weights.phi_v, phi);
  });
  add("gate", false, 0, element_ * rows(dk()) + keys(24 + 4 * dk()), [=, this](Context& ctx) {
    nsa_gate_backward(ctx, t_.dq_group, t_.weight_grads.gate, t_.dgate, s.gate, in_.q, t_.weights.gate, n.gate);
  });
  add("nsa", false, products(pairs.cmp + pairs.sel + pairs.win, 3 * dk() + 2 * dv()),
      element_ * (rows(dk() + 4 * dv()) + 6 * keys(widths)) + rows(12 + 4 * dk()),
      [=, this](Context& ctx) { nsa_backward(ctx, grad_, t_.weight_grads, t_.dout, in_, s, t_.weights, n); });
}

void Parts::add_dense() {
  const AttendIn in{in_.q, in_.k[kWin], in_.v[kWin]};
  const NsaSaved& s = t_.saved;
  const Tensor delta = t_.delta[kWin];
  add_branch(
      "dense", attended_pairs(c_, p_.T).win, keys(dk() + dv()),
      [=, this](Context& ctx) {
        nsa_attend_window_forward(ctx, {s.o[kWin], s.lse[kWin]}, in, p_.T);
      },
      [=, this](Context& ctx) {
        Scratch::Scope scope(ctx.scratch);
        attention_delta(ctx, delta, t_.dout, s.o[kWin]);
        zero(ctx, t_.dq);
        nsa_attend_window_backward(ctx, {t_.dq, grad_.k[kWin], grad_.v[kWin]},
                                   {t_.dout, {}, delta, s.lse[kWin], make_quantum(ctx, scope)}, in, p_.T);
      });
  parts_.insert(parts_.end(), backward_.begin(), backward_.end());
}

// What an input asks of its device: found by a dry run.
struct Memory {
  int64_t arena = 0;  // all of it
  int64_t saved = 0, scratch_forward = 0, scratch_backward = 0;
  // From forward's beginning to backward's end, beyond q, k, v: what PyTorch calls the peak of the two.
  int64_t peak = 0;
};
Memory plan(const AttentionProblem& p, Device device, DType dtype, bool deterministic) {
  Memory m;
  for (const bool forward : {true, false}) {
    Runtime runtime({.device = device, .planning = true, .deterministic = deterministic});
    const Tensors t = allocate(runtime.arena(), p, dtype);
    m.arena = runtime.arena().used_bytes();
    const Parts parts(device, p, t, dtype);
    for (const Part& part : parts.all())
      if (part.forward == forward) part.work(runtime.ctx());
    (forward ? m.scratch_forward : m.scratch_backward) = runtime.scratch().peak_bytes();
    m.saved = saved_bytes(t.saved);
    m.peak = m.saved + t.dqkv.bytes() + t.dout.bytes() + t.dq.bytes() + m.scratch_backward;
    if (!t.dq_group.empty()) m.peak += t.dq_group.bytes();
    if (t.out.data != t.saved.o[kWin].data) m.peak += t.out.bytes();
  }
  m.arena += align_up(std::max(m.scratch_forward, m.scratch_backward));
  return m;
}

struct AttentionBench {
  Device device;
  DType dtype;
  bool json;
  Stopwatch stopwatch{device};
  BenchRows rows{
      .what = "attention", .device = device, .dtype = dtype, .ceiling = measure_ceiling(device, dtype, stopwatch)};
};

// As fresh weights are: N(0, 0.02).
std::vector<std::byte> random_weight(const Tensor& w) {
  constexpr double kStd = 0.02;
  const Philox random(1, 1);
  std::vector<std::byte> host(static_cast<size_t>(w.bytes()));
  for (int64_t i = 0; i < w.numel(); ++i)
    store_element(host.data(), i, w.dtype, kStd * random.normal(static_cast<uint64_t>(i)));
  return host;
}

std::string case_name(const AttentionProblem& p, const std::string& data, bool nondeterministic) {
  std::string name = p.name + " " + data;
  const NsaConfig &n = p.config.nsa, usual;
  if (!p.config.dense() &&
      (n.l != usual.l || n.d != usual.d || n.l_sel != usual.l_sel || n.n_sel != usual.n_sel || n.w != usual.w))
    name += fmt::format(" l{} d{} l'{} n{} w{}", n.l, n.d, n.l_sel, n.n_sel, n.w);
  if (nondeterministic) name += " nondeterministic";
  return name;
}

Json overlap_json(Context& ctx, const Tensor& lists) {
  std::vector<int32_t> host(static_cast<size_t>(lists.numel()));
  read(ctx, host.data(), lists);
  const Overlap o = overlap_of(host, lists.size(0), lists.size(1), lists.size(2), lists.size(3));
  return {{"shared_with_neighbour", o.neighbours}, {"union_of_4", o.union4}, {"union_of_10", o.union10}};
}

double gigabytes(int64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

void print_case(const std::string& name, const std::vector<Json>& rows, const Memory& m, const Json& overlap) {
  fmt::print("\n{}\n{:<12} {:>11} {:>9} {:>9} {:>14} {:>9} {:>9}\n", name, "part", "forward ms", "TFLOP/s", "of floor",
             "backward ms", "TFLOP/s", "of floor");
  const auto number = [](const Json* row, const char* key, double scale, const char* unit, int decimals) {
    return row == nullptr ? std::string("-")
                          : fmt::format("{:.{}f}{}", (*row)[key].get<double>() * scale, decimals, unit);
  };
  std::vector<std::string> parts;
  for (const Json& row : rows) {
    const std::string part = row["part"];
    if (std::find(parts.begin(), parts.end(), part) == parts.end()) parts.push_back(part);
  }
  for (const std::string& part : parts) {
    const Json *forward = nullptr, *backward = nullptr;
    for (const Json& row : rows)
      if (row["part"] == part) (row["pass"] == "forward" ? forward : backward) = &row;
    fmt::print("{:<12} {:>11} {:>9} {:>9} {:>14} {:>9} {:>9}\n", part, number(forward, "us", 1e-3, "", 3),
               number(forward, "tflop_per_s", 1, "", 1), number(forward, "share_of_floor", 100, "%", 1),
               number(backward, "us", 1e-3, "", 3), number(backward, "tflop_per_s", 1, "", 1),
               number(backward, "share_of_floor", 100, "%", 1));
  }
  fmt::print("memory: saved {:.3f} GB, scratch {:.3f} and {:.3f} GB, peak of both passes beyond q, k, v {:.3f} GB\n",
             gigabytes(m.saved), gigabytes(m.scratch_forward), gigabytes(m.scratch_backward), gigabytes(m.peak));
  if (!overlap.is_null())
    fmt::print(
        "lists: a token shares {:.1f}% of its blocks with the one before; 4 neighbours list {:.2f}, 10 list {:.2f} "
        "times "
        "what one does\n",
        100 * overlap["shared_with_neighbour"].get<double>(), overlap["union_of_4"].get<double>(),
        overlap["union_of_10"].get<double>());
}

void bench_problem(AttentionBench& bench, AttentionProblem p, const std::string& data, const AttentionOptions& o) {
  const bool drawn = data == "randn" || data == "local";
  const Normals normals(2);
  const std::vector<std::byte> qkv = drawn ? random_qkv(p, bench.dtype, data == "local" ? kLocalDrift : 0, normals)
                                           : trained_qkv(p, data, {o.text, o.layer}, bench.device, bench.dtype);
  const std::string name = case_name(p, drawn ? data : "trained", o.nondeterministic),
                    op = p.config.dense() ? "dense" : "attention";
  const Memory memory = plan(p, bench.device, bench.dtype, !o.nondeterministic);
  const int64_t free = backend::info(bench.device).free_bytes;
  if (memory.arena > free) {
    const std::string why =
        fmt::format("needs {:.1f} GB, {:.1f} GB are free", gigabytes(memory.arena), gigabytes(free));
    bench.rows.rows.push_back({{"op", op}, {"case", name}, {"skipped", why}});
    if (!bench.json) fmt::print("\n{}\nskipped: {}\n", name, why);
    return;
  }
  Runtime runtime({.device = bench.device,
                   .arena_bytes = memory.arena,
                   .scratch_bytes = align_up(std::max(memory.scratch_forward, memory.scratch_backward)),
                   .deterministic = !o.nondeterministic});
  Context& ctx = runtime.ctx();
  const Tensors t = allocate(runtime.arena(), p, bench.dtype);
  write(ctx, t.qkv, qkv.data());
  write(ctx, t.dout.view({p.B * p.T, p.config.n_heads * p.config.d_v}),
        random_rows(p.B * p.T, p.config.n_heads, p.config.d_v, bench.dtype, Normals(3)).data());
  zero(ctx, t.dq);
  for (const Tensor& w : t.drawn_weights) write(ctx, w, random_weight(w).data());

  const Parts parts(bench.device, p, t, bench.dtype);
  for (const Part& part : parts.all()) part.work(ctx);
  std::vector<Json> rows;
  for (const Part& part : parts.all()) {
    const Timing timing = bench.stopwatch(ctx, [&] { part.work(ctx); });
    const bool whole = part.name == "nsa" || part.name == "dense";
    rows.push_back({{"op", whole ? op : op + " " + part.name},
                    {"part", part.name},
                    {"case", name},
                    {"pass", part.forward ? "forward" : "backward"},
                    {"us", timing.us},
                    {"runs", timing.runs},
                    {"tflop_per_s", part.flops / timing.us * 1e-6},
                    {"share_of_floor", bench.rows.ceiling.floor_us(part.flops, part.bytes) / timing.us}});
    if (whole && !part.forward) {
      rows.back()["saved_bytes"] = memory.saved;
      rows.back()["scratch_bytes"] = memory.scratch_backward;
      rows.back()["peak_bytes"] = memory.peak;
    }
  }
  const Json overlap = p.config.dense() ? Json() : overlap_json(ctx, t.saved.block_index);
  if (!overlap.is_null()) rows.back()["lists"] = overlap;
  if (!bench.json) print_case(name, rows, memory, overlap);
  if (!bench.json && bench.device.is_cuda()) fmt::print("{}\n", ctx.routes.summary());
  bench.rows.rows.insert(bench.rows.rows.end(), rows.begin(), rows.end());
}

void run_attention(const AttentionOptions& o) {
  std::vector<AttentionProblem> problems;
  for (const std::string& shape : o.shapes) problems.push_back(parse_shape(shape, o));
  o.common.check_files();
  const Device device = o.common.chosen_device();
  AttentionBench bench{.device = device, .dtype = o.common.chosen_dtype(device), .json = o.common.json};
  if (!bench.json) fmt::print("{}\n", describe(bench.rows));
  for (const AttentionProblem& p : problems)
    for (const std::string& data : o.data) bench_problem(bench, p, data, o);
  bench.rows.finish(o.common);
}

}  // namespace

CLI::App* add_bench_attention(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand("attention", "time NSA, its branches and parts, or dense attention");
  const auto o = std::make_shared<AttentionOptions>();
  verb->add_option("--shapes", o->shapes, "BxTxHqxHkvxd, comma-separated; d also as 192v128")
      ->delimiter(',')
      ->capture_default_str();
  verb->add_option("--data", o->data,
                   "randn, local, or a checkpoint (which brings its own nsa options), comma-separated")
      ->delimiter(',')
      ->capture_default_str();
  verb->add_option("--text", o->text, "what a checkpoint reads: text files or token shards, globs");
  verb->add_option("--layer", o->layer, "of the checkpoint (default: the middle one)")
      ->check(within(at_least(0).up_to(10000)));
  verb->add_option_function<std::string>(
          "--attention",
          [o](const std::string& word) { o->attention = word == "dense" ? AttentionKind::dense : AttentionKind::nsa; },
          "nsa or dense (default: nsa)")
      ->check(CLI::IsMember({"nsa", "dense"}));
  const auto size = [&](const char* name, int64_t& value, const char* what) {
    verb->add_option(name, value, what)->check(within(at_least(1).up_to(1 << 20)))->capture_default_str();
  };
  size("--l", o->nsa.l, "compression block, tokens");
  size("--d", o->nsa.d, "compression stride, tokens");
  size("--l-sel", o->nsa.l_sel, "selection block, tokens");
  size("--n-sel", o->nsa.n_sel, "selected blocks a query");
  size("--w", o->nsa.w, "sliding window, tokens");
  verb->add_flag("--nondeterministic", o->nondeterministic, "as runtime.deterministic false");
  o->common.add_to(*verb);
  verb->callback([o] { run_attention(*o); });
  return verb;
}

}  // namespace triad
