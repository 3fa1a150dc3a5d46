// A large problem for NSA's kernels on a GPU, and its reference: one branch in the last sequence, computed on the host
// in plain double loops over rows and keys, directly from NSA's definition (kernels/nsa/nsa.h).
#pragma once
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "kernels/nsa/nsa.h"
#include "tests/support/large.h"

namespace triad::test::large {  // a namespace of its own, because nsa_problem.h defines other types with these names

using Floats = std::vector<float>;

inline constexpr int kCmp = 0, kSel = 1, kWin = 2;
inline constexpr const char* kBranches[] = {"compressed", "selected", "window"};

struct Sizes {
  int64_t T, Hkv, G, dk, dv;
  NsaConfig c = {};
  double logit_std = 1, logit_mean = 0;
  int64_t row_stride = 0;  // elements between consecutive tokens' rows; 0: contiguous
  int64_t B = 1;           // sequences; only the last one is checked
  int64_t Hq() const { return Hkv * G; }
  int64_t Tc() const { return compressed_length(T, c.l, c.d); }
  // A logit's absolute error grows with its size, and exp turns it into a relative error.
  double f32_tolerance() const { return 4e-6 * std::max(5.0, 4 * logit_std + std::abs(logit_mean)); }
  double tolerance(DType dtype) const { return dtype == DType::bf16 ? 1e-2 : f32_tolerance(); }
  std::string str() const {
    return "B " + std::to_string(B) + " T " + std::to_string(T) + " Hkv " + std::to_string(Hkv) + " G " +
           std::to_string(G) + " dk " + std::to_string(dk) + " dv " + std::to_string(dv);
  }
};

inline NsaConfig config(int64_t l, int64_t d, int64_t l_sel, int64_t n_sel, int64_t w) {
  NsaConfig c;
  c.l = l, c.d = d, c.l_sel = l_sel, c.n_sel = n_sel, c.w = w;
  return c;
}

// Random inputs for all three branches, forward's results, and gradients in the branch that backward() ran last. The
// compressed branch's keys and values are random too, not compressed tokens.
class Problem {
 public:
  Sizes n;
  DType T;
  Tensor q, dout, out, gate, dgate, delta, lists, dq;
  std::array<Tensor, 3> k, v, o, lse, dk, dv;

  Problem(Runtime& rt, const Sizes& sizes, DType dtype) : n(sizes), T(dtype), rt_(rt) {
    const Shape q_shape = {n.B, n.T, n.Hq(), n.dk}, o_shape = {n.B, n.T, n.Hq(), n.dv};
    if (n.row_stride > 0) {  // one allocation for each dtype; every tensor is a column range in it
      for (const DType type : {T, DType::f32})
        blocks_.push_back(type == T && !blocks_.empty() ? blocks_[0] : allocate(rt, type, {n.B * n.T * n.row_stride}));
      staging_ = allocate(rt, DType::f32, {n.B * n.T * n.Hq() * std::max(n.dk, n.dv)});
    }
    const double shift = n.logit_mean * std::sqrt(static_cast<double>(n.dk)) / kShift;
    q = input(q_shape, n.logit_std, n.logit_mean != 0 ? kShift : 0);
    dout = input(o_shape);
    const Tensor k_tokens = input({n.B, n.T, n.Hkv, n.dk}, 1, shift), v_tokens = input({n.B, n.T, n.Hkv, n.dv});
    k = {input({n.B, n.Tc(), n.Hkv, n.dk}, 1, shift), k_tokens, k_tokens};
    v = {input({n.B, n.Tc(), n.Hkv, n.dv}), v_tokens, v_tokens};
    gate = allocate(rt, DType::f32, {3, n.B, n.T, n.Hkv});
    repeat(ctx(), gate, draw(1009, stream_++, 0.25, 0.5));
    dgate = poisoned(rt, DType::f32, gate.shape());
    delta = poisoned(rt, DType::f32, {3, n.B, n.T, n.Hq()});
    lists = poisoned(rt, DType::i32, {n.B, n.T, n.Hkv, n.c.n_sel});
    out = place(T, o_shape), dq = place(DType::f32, q_shape);
    for (int b = 0; b < 3; ++b) {
      o[b] = place(T, o_shape), lse[b] = poisoned(rt, DType::f32, {n.B, n.T, n.Hq()});
      const DType type = b == kCmp ? DType::f32 : T;  // the compression's backward reads f32 gradients
      dk[b] = place(type, k[b].shape()), dv[b] = place(type, v[b].shape());
    }
  }
  Context& ctx() { return rt_.ctx(); }

  void forward(bool select = true) {
    const NsaConfig& c = n.c;
    nsa_attend_compressed_forward(ctx(), {o[kCmp], lse[kCmp]}, in(kCmp), c);
    if (select) nsa_select(ctx(), lists, q, k[kCmp], lse[kCmp], c);
    nsa_attend_selected_forward(ctx(), {o[kSel], lse[kSel]}, in(kSel), lists, c.l_sel);
    nsa_attend_window_forward(ctx(), {o[kWin], lse[kWin]}, in(kWin), c.w);
    nsa_combine_forward(ctx(), out, {o[kCmp], o[kSel], o[kWin]}, gate);
    nsa_combine_backward(ctx(), dgate, delta, dout, {o[kCmp], o[kSel], o[kWin]}, gate);
  }
  void backward(int b) {
    zero(ctx(), dq);
    const AttendGradOut grads{dq, dk[b], dv[b]};
    Scratch::Scope scope(ctx().scratch);
    const Tensor rounding_unit = attend_rounding_unit(ctx(), scope, dq, dout, q, {{k[b], v[b], gate[b], delta[b]}});
    const AttendGradIn upstream{dout, gate[b], delta[b], lse[b], rounding_unit};
    if (b == kCmp) nsa_attend_compressed_backward(ctx(), grads, upstream, in(b), {n.c.l, n.c.d});
    if (b == kSel) nsa_attend_selected_backward(ctx(), grads, upstream, in(b), lists, n.c.l_sel);
    if (b == kWin) nsa_attend_window_backward(ctx(), grads, upstream, in(b), n.c.w);
  }
  // Copies tokens (or compressed blocks) [first, end) in the last sequence of a [B,T,..] tensor to the host.
  Floats rows(const Tensor& t, int64_t first = 0) {
    Tensor part = t.slice(0, n.B - 1, n.B).slice(1, first, t.size(1));
    if (!part.contiguous() && part.numel() > 0) {
      const Tensor dense(staging_.data, part.dtype, part.shape(), part.device);
      copy(ctx(), dense, part);
      part = dense;
    }
    return fetch(ctx(), part[0]);
  }

 private:
  // If n.logit_mean isn't 0: the value of element 0 in each row of q. Element 0 in each key is chosen so that their
  // product adds n.logit_mean to every logit.
  static constexpr double kShift = 32;

  AttendIn in(int b) const { return {q, k[b], v[b]}; }
  Tensor place(DType type, const Shape& shape) {
    if (n.row_stride == 0) return poisoned(rt_, type, shape);
    Tensor t(blocks_[type == T ? 0 : 1].data + column_ * size_of(type), type, shape, rt_.ctx().device);
    t.stride[0] = n.T * n.row_stride, t.stride[1] = n.row_stride;
    column_ += align_up(shape[2] * shape[3]);
    TRIAD_CHECK(column_ <= n.row_stride, "{} columns in rows of {}", column_, n.row_stride);
    return t;
  }
  Tensor input(const Shape& shape, double std = 1, double first = 0) {
    const Tensor t = place(T, shape);
    if (ctx().planning || t.numel() == 0) return t;
    Floats values = draw(std::min(shape.numel(), kPieceLength), stream_++, std);
    for (int64_t i = 0; first != 0 && i < shape.numel(); i += shape[3]) values[static_cast<size_t>(i)] = first;
    const Tensor dense = t.contiguous() ? t : Tensor(staging_.data, T, shape, t.device);
    repeat(ctx(), dense, values);
    if (!t.contiguous()) copy(ctx(), t, dense);
    return t;
  }

  Runtime& rt_;
  std::vector<Tensor> blocks_;  // memory: [0] for tensors with dtype T, [1] for f32 tensors
  Tensor staging_;              // a strided tensor's dense copy, for transfers to and from the host
  int64_t column_ = 0;
  uint64_t stream_ = 1;
};

// The reference for one branch in the last sequence, on the host: expected forward and backward results for rows [t0,
// T) and all keys.
class Reference {
 public:
  Reference(Problem& p, int b, int64_t t0)
      : p_(p),
        n_(p.n),
        b_(b),
        t0_(t0),
        scale_(1 / std::sqrt(static_cast<double>(p.n.dk))),
        q_(p.rows(p.q, t0)),
        dout_(p.rows(p.dout, t0)),
        lse_(p.rows(p.lse[b], t0)),
        delta_(p.rows(p.delta[b], t0)),
        gate_(p.rows(p.gate[b], t0)),
        lists_(p.rows(p.lists, t0)),
        k_(p.rows(p.k[b])),
        v_(p.rows(p.v[b])) {}

  int64_t row(int64_t t, int64_t h) const { return (t - t0_) * n_.Hq() + h; }
  float lse(int64_t t, int64_t h) const { return lse_[static_cast<size_t>(row(t, h))]; }
  const float* list(int64_t t, int64_t g) const { return &lists_[((t - t0_) * n_.Hkv + g) * n_.c.n_sel]; }
  const float* dout(int64_t t, int64_t h) const { return &dout_[row(t, h) * n_.dv]; }
  double gate(int64_t t, int64_t g) const { return gate_[(t - t0_) * n_.Hkv + g]; }
  double delta(int64_t t, int64_t h) const { return delta_[static_cast<size_t>(row(t, h))]; }

  bool sees(int64_t t, int64_t g, int64_t s) const {
    if (b_ == kCmp) return s * n_.c.d + n_.c.l <= t + 1;
    if (b_ == kWin) return s <= t && t < s + n_.c.w;
    const float* const l = list(t, g);
    return s <= t && std::find(l, l + n_.c.n_sel, static_cast<float>(s / n_.c.l_sel)) != l + n_.c.n_sel;
  }
  std::vector<int64_t> visible(int64_t t, int64_t g) const {
    std::vector<int64_t> keys;
    auto add = [&](int64_t begin, int64_t end) {
      for (int64_t s = std::max<int64_t>(begin, 0); s < end; ++s) keys.push_back(s);
    };
    if (b_ == kCmp) add(0, compressed_length(t + 1, n_.c.l, n_.c.d));
    if (b_ == kWin) add(t - n_.c.w + 1, t + 1);
    for (int64_t i = 0; b_ == kSel && i < n_.c.n_sel; ++i) {
      const int64_t block = static_cast<int64_t>(list(t, g)[i]);
      if (block >= 0) add(block * n_.c.l_sel, std::min((block + 1) * n_.c.l_sel, t + 1));
    }
    return keys;
  }
  double logit(int64_t t, int64_t h, int64_t s) const {
    return scale_ * product(&q_[row(t, h) * n_.dk], key(s, h / n_.G), n_.dk);
  }

  // A row's expected output; sets lse to its log-sum-exp.
  Expected output(int64_t t, int64_t h, double& lse) const {
    const std::vector<int64_t> keys = visible(t, h / n_.G);
    std::vector<double> x;
    for (const int64_t s : keys) x.push_back(logit(t, h, s));
    double max = -INFINITY, sum = 0;
    for (const double logit : x) max = std::max(max, logit);
    for (const double logit : x) sum += std::exp(logit - max);
    lse = keys.empty() ? -INFINITY : max + std::log(sum);
    Expected o(n_.dv);
    for (size_t i = 0; i < keys.size(); ++i) o.add(std::exp(x[i] - lse), value(keys[i], h / n_.G));
    return o;
  }
  // Computes the expected gradients from the GPU's lse and delta, which are checked separately.
  Expected query_gradient(int64_t t, int64_t h) const {
    Expected dq(n_.dk);
    for (const int64_t s : visible(t, h / n_.G)) {
      const Weights w = weights(t, h, s);
      dq.add(w.ds * scale_, key(s, h / n_.G), w.ds_size * scale_);
    }
    return dq;
  }
  // The expected gradients for a key that no row before t0 sees.
  void key_gradients(int64_t s, int64_t g, Expected& dk, Expected& dv) const {
    for (int64_t t = t0_; t < n_.T; ++t)
      for (int64_t h = g * n_.G; h < (g + 1) * n_.G && sees(t, g, s); ++h) {
        const Weights w = weights(t, h, s);
        dk.add(w.ds * scale_, &q_[row(t, h) * n_.dk], w.ds_size * scale_);
        dv.add(w.p * gate(t, g), dout(t, h));
      }
  }
  int64_t first_key() const {  // the first key that no row before t0 sees
    return b_ == kCmp ? std::max<int64_t>(0, (t0_ - n_.c.l + n_.c.d) / n_.c.d) : t0_;
  }

 private:
  struct Weights {
    double p, ds, ds_size;
  };
  Weights weights(int64_t t, int64_t h, int64_t s) const {
    const double p = std::exp(logit(t, h, s) - lse(t, h));
    const double dp = gate(t, h / n_.G) * product(dout(t, h), value(s, h / n_.G), n_.dv);
    return {p, p * (dp - delta(t, h)), p * (std::abs(dp) + std::abs(delta(t, h)))};
  }
  const float* key(int64_t s, int64_t g) const { return &k_[(s * n_.Hkv + g) * n_.dk]; }
  const float* value(int64_t s, int64_t g) const { return &v_[(s * n_.Hkv + g) * n_.dv]; }

  Problem& p_;
  const Sizes& n_;
  int b_;
  int64_t t0_;
  double scale_;
  Floats q_, dout_, lse_, delta_, gate_, lists_, k_, v_;
};

}  // namespace triad::test::large
