// NSA's kernels on the GPU where they are hard pressed: 65,536 tokens, offsets past 2^31 and 2^32, logits of +-100, one
// list for all tokens, wide and odd heads. Samples of every result are compared with the definition in plain double
// loops (SPEC section 1.1).
#include <algorithm>
#include <numeric>
#include <string>

#include "kernels/nsa.h"
#include "tests/large.h"

namespace {

using namespace triad;
using namespace triad::test;
using Floats = std::vector<float>;

constexpr int kCmp = 0, kSel = 1, kWin = 2;
const char* const kBranches[] = {"compressed", "selected", "window"};

struct Sizes {
  int64_t T, Hkv, G, dk, dv;
  NsaConfig c = {};
  double logit_std = 1, logit_mean = 0;
  int64_t row_stride = 0;  // elements from one token's rows to the next's; 0: contiguous
  int64_t B = 1;           // the last sequence is the one that is checked
  int64_t Hq() const { return Hkv * G; }
  int64_t Tc() const { return compressed_length(T, c.l, c.d); }
  // Absolute errors of logits grow with them, and are relative ones of what comes after exp.
  double f32_tolerance() const { return 4e-6 * std::max(5.0, 4 * logit_std + std::abs(logit_mean)); }
  double tolerance(DType dtype) const { return dtype == DType::bf16 ? 1e-2 : f32_tolerance(); }
  std::string str() const {
    return "B " + std::to_string(B) + " T " + std::to_string(T) + " Hkv " + std::to_string(Hkv) + " G " +
           std::to_string(G) + " dk " + std::to_string(dk) + " dv " + std::to_string(dv);
  }
};

NsaConfig config(int64_t l, int64_t d, int64_t l_sel, int64_t n_sel, int64_t w) {
  NsaConfig c;
  c.l = l, c.d = d, c.l_sel = l_sel, c.n_sel = n_sel, c.w = w;
  return c;
}

// The branches' inputs (compressed keys too are drawn), what forward leaves, and the gradients of the
// branch that backward ran last.
class Problem {
 public:
  Sizes n;
  DType T;
  Tensor q, dout, out, gate, dgate, delta, lists, dq;
  std::array<Tensor, 3> k, v, o, lse, dk, dv;

  Problem(Runtime& rt, const Sizes& sizes, DType dtype) : n(sizes), T(dtype), rt_(rt) {
    const Shape q_shape = {n.B, n.T, n.Hq(), n.dk}, o_shape = {n.B, n.T, n.Hq(), n.dv};
    if (n.row_stride > 0) {  // all tensors of a type lie in one block, each in columns of its own
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
      const DType type = b == kCmp ? DType::f32 : T;  // phi's backward takes sums
      dk[b] = place(type, k[b].shape()), dv[b] = place(type, v[b].shape());
    }
  }
  Context& ctx() { return rt_.ctx(); }

  void forward(bool select = true) {
    const NsaConfig& c = n.c;
    nsa_attend_compressed_forward(ctx(), {o[kCmp], lse[kCmp]}, in(kCmp), {c.l, c.d});
    if (select)
      nsa_select(ctx(), lists, q, k[kCmp], lse[kCmp], {c.l, c.d, c.l_sel, c.n_sel, c.init_blocks, c.local_blocks});
    nsa_attend_selected_forward(ctx(), {o[kSel], lse[kSel]}, in(kSel), lists, c.l_sel);
    nsa_attend_window_forward(ctx(), {o[kWin], lse[kWin]}, in(kWin), c.w);
    nsa_combine_forward(ctx(), out, {o[kCmp], o[kSel], o[kWin]}, gate);
    nsa_combine_backward(ctx(), dgate, delta, dout, {o[kCmp], o[kSel], o[kWin]}, gate);
  }
  void backward(int b) {
    zero(ctx(), dq);
    const AttendGradOut grads{dq, dk[b], dv[b]};
    Scratch::Scope scope(ctx().scratch);
    const Tensor quantum = attend_quantum(ctx(), scope, dq, dout, q, {{k[b], v[b], gate[b], delta[b]}});
    const AttendGradIn upstream{dout, gate[b], delta[b], lse[b], quantum};
    if (b == kCmp) nsa_attend_compressed_backward(ctx(), grads, upstream, in(b), {n.c.l, n.c.d});
    if (b == kSel) nsa_attend_selected_backward(ctx(), grads, upstream, in(b), lists, n.c.l_sel);
    if (b == kWin) nsa_attend_window_backward(ctx(), grads, upstream, in(b), n.c.w);
  }
  // Tokens (or compressed blocks) [first, ..) of the last sequence of a [B,T,..] tensor.
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
  static constexpr double kShift = 32;  // element 0 of each q where logits have a mean; keys hold the other factor

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
  std::vector<Tensor> blocks_;  // of type T, of f32
  Tensor staging_;              // where a strided tensor becomes dense on its way to or from the host
  int64_t column_ = 0;
  uint64_t stream_ = 1;
};

// One branch of the last sequence on the host: all its keys, the rows [t0, T), and what forward and backward should
// make of them.
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

  // o of a row, and its lse.
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
  // The gradients take lse and delta as forward left them: those are checked on their own.
  Expected query_gradient(int64_t t, int64_t h) const {
    Expected dq(n_.dk);
    for (const int64_t s : visible(t, h / n_.G)) {
      const Weights w = weights(t, h, s);
      dq.add(w.ds * scale_, key(s, h / n_.G), w.ds_size * scale_);
    }
    return dq;
  }
  // Of a key that no row before t0 sees.
  void key_gradients(int64_t s, int64_t g, Expected& dk, Expected& dv) const {
    for (int64_t t = t0_; t < n_.T; ++t)
      for (int64_t h = g * n_.G; h < (g + 1) * n_.G && sees(t, g, s); ++h) {
        const Weights w = weights(t, h, s);
        dk.add(w.ds * scale_, &q_[row(t, h) * n_.dk], w.ds_size * scale_);
        dv.add(w.p * gate(t, g), dout(t, h));
      }
  }
  int64_t first_key() const {  // that no row before t0 sees
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

struct Sample {
  int64_t t, h;
};
// Heads in turn at rows from t0 to T - 1: around multiples of what tiles, blocks and windows have, and evenly.
std::vector<Sample> sample_rows(const Sizes& n, int64_t t0) {
  std::vector<int64_t> rows = {t0, t0 + 1, n.T - 2, n.T - 1};
  for (int64_t power = 16; power < n.T; power *= 2) rows.insert(rows.end(), {power - 1, power});
  for (int64_t i = 0; i < 64; ++i) rows.push_back(t0 + i * (n.T - 1 - t0) / 63);
  std::erase_if(rows, [&](int64_t t) { return t < t0 || t >= n.T; });
  std::vector<Sample> samples = {{t0, 0}, {n.T - 1, n.Hq() - 1}};
  for (const int64_t t : rows) samples.push_back({t, static_cast<int64_t>(samples.size()) * 7 % n.Hq()});
  return samples;
}

bool all_finite(const Floats& x) {
  return std::all_of(x.begin(), x.end(), [](float f) { return std::isfinite(f); });
}

void check_forward(Problem& p, int b, const Reference& r, const std::vector<Sample>& samples, int64_t t0) {
  const Floats o = p.rows(p.o[b], t0);
  std::vector<double> lse_errors(samples.size());
  const double o_error = worst_of(static_cast<int64_t>(samples.size()), [&](int64_t i) {
    const auto [t, h] = samples[static_cast<size_t>(i)];
    double lse = 0;
    const Expected want = r.output(t, h, lse);
    const double off = lse == r.lse(t, h) ? 0 : std::abs(lse - r.lse(t, h));
    lse_errors[static_cast<size_t>(i)] = std::isfinite(off) ? off : INFINITY;
    return want.error_of(&o[r.row(t, h) * p.n.dv]);
  });
  const double lse_error = *std::max_element(lse_errors.begin(), lse_errors.end());
  CHECK(all_finite(o));
  CHECK(o_error < p.n.tolerance(p.T));
  CHECK(lse_error < p.n.f32_tolerance());
}

void check_backward(Problem& p, int b, const Reference& r, const std::vector<Sample>& samples, int64_t t0) {
  constexpr int64_t kKeys = 16;
  const Sizes& n = p.n;
  const Floats dq = p.rows(p.dq, t0), dk = p.rows(p.dk[b]), dv = p.rows(p.dv[b]);
  CHECK(all_finite(dq));
  CHECK(all_finite(dk));
  CHECK(all_finite(dv));
  const double dq_error = worst_of(static_cast<int64_t>(samples.size()), [&](int64_t i) {
    const auto [t, h] = samples[static_cast<size_t>(i)];
    return r.query_gradient(t, h).error_of(&dq[r.row(t, h) * n.dk]);
  });
  CHECK(dq_error < p.n.tolerance(p.T));
  const int64_t first = r.first_key(), last = p.k[b].size(1) - 1;
  if (last < first) return;
  std::array<double, kKeys> dv_errors{};
  const double dk_error = worst_of(kKeys, [&](int64_t i) {
    const int64_t s = first + i * (last - first) / (kKeys - 1), g = (i + i / n.Hkv) % n.Hkv;
    Expected want_dk(n.dk), want_dv(n.dv);
    r.key_gradients(s, g, want_dk, want_dv);
    dv_errors[static_cast<size_t>(i)] = want_dv.error_of(&dv[(s * n.Hkv + g) * n.dv]);
    return want_dk.error_of(&dk[(s * n.Hkv + g) * n.dk]);
  });
  CHECK(dk_error < p.n.tolerance(p.T));
  CHECK(*std::max_element(dv_errors.begin(), dv_errors.end()) < p.n.tolerance(p.T));
}

// How far, relatively, a listed block scores below one that was left out; infinite for a list that breaks a rule.
double list_error(const Sizes& n, const Reference& cmp, int64_t t, int64_t g) {
  const NsaConfig& c = n.c;
  const int64_t current = t / c.l_sel, count = std::min(c.n_sel, current + 1);
  const float *const list = cmp.list(t, g), *const end = list + count;
  auto has = [&](int64_t j) { return std::find(list, end, static_cast<float>(j)) != end; };
  auto forced = [&](int64_t j) { return j < c.init_blocks || j > current - c.local_blocks; };
  bool valid = std::is_sorted(list, end) && std::adjacent_find(list, end) == end && list[0] >= 0;
  for (const float* tail = end; tail < list + c.n_sel; ++tail) valid = valid && *tail == -1;
  std::vector<double> score(static_cast<size_t>(current + 1), 0.0);
  for (const int64_t s : cmp.visible(t, g))
    for (int64_t h = g * n.G; h < (g + 1) * n.G; ++h) {
      const double p = std::exp(cmp.logit(t, h, s) - cmp.lse(t, h)) / static_cast<double>(c.l);
      for (int64_t token = s * c.d; token < s * c.d + c.l; ++token) score[static_cast<size_t>(token / c.l_sel)] += p;
    }
  double lowest_listed = INFINITY, highest_left_out = 0;
  for (int64_t j = 0; j <= current; ++j) {
    const double x = score[static_cast<size_t>(j)];
    if (forced(j)) valid = valid && has(j);
    if (!forced(j) && has(j)) lowest_listed = std::min(lowest_listed, x);
    if (!forced(j) && !has(j)) highest_left_out = std::max(highest_left_out, x);
  }
  if (!valid) return INFINITY;
  return lowest_listed >= highest_left_out ? 0 : 1 - lowest_listed / highest_left_out;
}

void check_selection(Problem& p, const Reference& cmp, const std::vector<Sample>& samples) {
  const double error = worst_of(static_cast<int64_t>(samples.size()), [&](int64_t i) {
    const auto [t, h] = samples[static_cast<size_t>(i)];
    return list_error(p.n, cmp, t, h / p.n.G);
  });
  CHECK(error < 1e-5);
}

// out = sum of gate * o;  delta = gate * dout.o;  dgate = dout.o summed over the group's heads
void check_combine(Problem& p, const std::vector<Sample>& samples, int64_t t0) {
  const Sizes& n = p.n;
  const Floats out = p.rows(p.out, t0), dout = p.rows(p.dout, t0);
  std::array<Floats, 3> o, gate, delta, dgate;
  for (int b = 0; b < 3; ++b)
    o[b] = p.rows(p.o[b], t0), gate[b] = p.rows(p.gate[b], t0), delta[b] = p.rows(p.delta[b], t0),
    dgate[b] = p.rows(p.dgate[b], t0);
  const double error = worst_of(static_cast<int64_t>(samples.size()), [&](int64_t i) {
    const auto [t, h] = samples[static_cast<size_t>(i)];
    const int64_t row = (t - t0) * n.Hq() + h, group = (t - t0) * n.Hkv + h / n.G;
    Expected want(n.dv);
    double worst = 0;
    for (int b = 0; b < 3; ++b) {
      const float weight = gate[b][static_cast<size_t>(group)];
      want.add(weight, &o[b][row * n.dv]);
      Expected want_delta(1), want_dgate(1);
      for (int64_t j = 0; j < n.G * n.dv; ++j) {
        const int64_t at = group * n.G * n.dv + j;
        want_dgate.add(dout[static_cast<size_t>(at)], &o[b][at]);
        if (at / n.dv == row) want_delta.add(static_cast<double>(weight) * dout[static_cast<size_t>(at)], &o[b][at]);
      }
      worst = std::max({worst, want_delta.error_of(&delta[b][row]), want_dgate.error_of(&dgate[b][group])});
    }
    return std::max(worst, want.error_of(&out[row * n.dv]));
  });
  CHECK(error < p.n.tolerance(p.T));
}

// All results at sampled rows of [t0, T), and at keys that only those see. `lists`, where given, are attended to
// instead of the selection's.
void check_problem(Problem& p, int64_t t0 = 0, const std::vector<int32_t>& lists = {}) {
  const std::vector<Sample> samples = sample_rows(p.n, t0);
  if (!lists.empty()) write(p.ctx(), p.lists, lists.data());
  p.forward(lists.empty());
  check_combine(p, samples, t0);
  for (int b = 0; b < 3; ++b) {
    if (!lists.empty() && b != kSel) continue;
    INFO("the " << kBranches[b] << " branch");
    const Reference r(p, b, t0);
    check_forward(p, b, r, samples, t0);
    if (b == kCmp) check_selection(p, r, samples);
    p.backward(b);
    check_backward(p, b, r, samples, t0);
  }
}

// The memory a problem needs, whether or not this GPU has it.
Runtime::Options options_for(const Sizes& n, DType dtype) {
  return memory_for([&](Runtime& plan) {
    Problem p(plan, n, dtype);
    p.forward();
    for (int b = 0; b < 3; ++b) p.backward(b);
  });
}

void check_sizes(const Sizes& n, DType dtype, int64_t t0 = 0, const std::vector<int32_t>& lists = {}) {
  INFO(n.str() << " " << name_of(dtype));
  const Runtime::Options options = options_for(n, dtype);
  if (!require_gpu_memory(options.arena_bytes)) return;
  Runtime rt(options);
  Problem p(rt, n, dtype);
  check_problem(p, t0, lists);
}

std::vector<std::byte> bytes_of(Problem& p, std::initializer_list<Tensor> tensors) {
  std::vector<std::byte> all;
  for (const Tensor& t : tensors) {
    const size_t begin = all.size();
    all.resize(begin + static_cast<size_t>(t.bytes()));
    read(p.ctx(), all.data() + begin, t);
  }
  return all;
}

// The same bits, run after run.
void check_repeats(const Sizes& n, DType dtype) {
  INFO(n.str() << " " << name_of(dtype));
  Runtime rt(options_for(n, dtype));
  Problem p(rt, n, dtype);
  auto run = [&] {
    p.forward();
    std::vector<std::vector<std::byte>> results = {bytes_of(p, {p.out, p.dgate, p.delta, p.lists})};
    for (int b = 0; b < 3; ++b) {
      p.backward(b);
      results.push_back(bytes_of(p, {p.o[b], p.lse[b], p.dq, p.dk[b], p.dv[b]}));
    }
    return results;
  };
  const auto first = run(), second = run();
  for (size_t i = 0; i < first.size(); ++i) {
    INFO(i);
    const bool equal = first[i] == second[i];
    CHECK(equal);
  }
}

constexpr DType kGpuTypes[] = {DType::f32, DType::bf16};

}  // namespace

TEST_CASE("NSA agrees with its definition at 8,192 and 65,536 tokens (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const int64_t T : {8192, 65536})
    for (const DType dtype : kGpuTypes) check_sizes({T, 2, 6, 64, 64}, dtype);
}

// More blocks than the selected branch's union tiles have bits for; the longest rows and the keys that they alone see.
TEST_CASE("NSA agrees with its definition at 65,601 to a million tokens (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const Sizes& n :
       {Sizes{65601, 1, 6, 64, 64}, {131101, 2, 3, 64, 64}, {1048583, 1, 1, 64, 64}, {80003, 1, 2, 128, 128}})
    check_sizes(n, DType::bf16, n.T - 1200);
}

TEST_CASE("NSA gives the same bits twice at 8,192 tokens (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const DType dtype : kGpuTypes) check_repeats({8192, 2, 6, 64, 64}, dtype);
}

// 65,536 tokens of 272 heads of 128 are 2.3e9 elements; keys near the end are seen by few rows.
TEST_CASE("NSA counts past 2^31 elements (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  check_sizes({65536, 17, 16, 128, 128}, DType::bf16, 65536 - 1200);
}

// Rows 15 million elements apart: the second of two sequences of 150 tokens begins past 2^31, and ends past 2^32.
TEST_CASE("NSA takes strides that lead past 2^31 and 2^32 elements (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const int64_t B : {1, 2})
    for (const DType dtype : kGpuTypes)
      check_sizes({.T = 300 / B,
                   .Hkv = 2,
                   .G = 6,
                   .dk = 64,
                   .dv = 64,
                   .c = config(4, 2, 16, 6, 100),
                   .row_stride = 15'000'064,
                   .B = B},
                  dtype);
}

TEST_CASE("NSA stays finite and right with logits of +-100 and sums near exp(-120) (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const DType dtype : kGpuTypes)
    for (const int64_t dk : {64, 128}) {
      check_sizes({.T = 1500, .Hkv = 2, .G = 6, .dk = dk, .dv = 64, .logit_std = 35}, dtype);
      check_sizes({.T = 1500, .Hkv = 2, .G = 6, .dk = dk, .dv = 64, .logit_mean = -120}, dtype);
    }
}

TEST_CASE("NSA's selected branch takes one list for all tokens (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  const Sizes n{8192, 2, 6, 64, 64};
  for (const std::vector<int32_t>& list : {std::vector<int32_t>{0}, {0, 1, 2, 3, 40, 41, 63, 64, 100, 120, 127}}) {
    std::vector<int32_t> lists(static_cast<size_t>(n.T * n.Hkv * n.c.n_sel), -1);
    for (size_t row = 0; row < lists.size(); row += static_cast<size_t>(n.c.n_sel))
      std::copy(list.begin(), list.end(), lists.begin() + static_cast<int64_t>(row));
    for (const DType dtype : kGpuTypes) check_sizes(n, dtype, 0, lists);
  }
  // Where there are more than 1,024 blocks.
  const Sizes longer{65601, 1, 6, 64, 64};
  std::vector<int32_t> lists(static_cast<size_t>(longer.T * longer.c.n_sel), -1);
  for (size_t row = 0; row < lists.size(); row += static_cast<size_t>(longer.c.n_sel))
    std::iota(lists.begin() + static_cast<int64_t>(row), lists.begin() + static_cast<int64_t>(row) + 5, 0);
  check_sizes(longer, DType::bf16, longer.T - 1200, lists);
}

TEST_CASE("NSA takes groups of 12 and 16 heads, and wide and odd ones (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const DType dtype : kGpuTypes)
    for (const Sizes& n :
         {Sizes{1111, 1, 12, 64, 64}, {1111, 2, 16, 192, 128}, {777, 2, 12, 100, 60}, {1500, 1, 12, 192, 128}})
      check_sizes(n, dtype);
}
