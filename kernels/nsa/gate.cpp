// The gates and the gated sum: checks, dispatch, and the CPU reference. A sum over tokens has a fixed number of partial
// sums, so it doesn't depend on the thread count.
#include "kernels/nsa/gate.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/op_scope.h"
#include "kernels/common/cpu_exp.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

// hidden: the gate MLP's hidden units, dk / 2.
struct Sizes {
  int64_t B, T, Hq, Hkv, G, dk, hidden;
};

template <class TensorType>
void check_weights(const char* what, const GateTensors<TensorType>& w, int64_t dk, int64_t hidden, DType dtype) {
  check_tensor(what, w.fc1_w, {hidden, dk}, dtype);
  check_tensor(what, w.fc1_b, {hidden}, dtype);
  check_tensor(what, w.fc2_w, {3, hidden}, dtype);
  check_tensor(what, w.fc2_b, {3}, dtype);
}

// Checks gate or dgate [3,B,T,Hkv] against q or dout [B,T,Hq,D] and returns the sizes.
Sizes check_gate(const char* what, const ConstTensor& gate, const ConstTensor& q) {
  TRIAD_CHECK(q.rank == 4 && is_float(q.dtype) && gate.rank == 4, "{}: heads {} and gate {} need four axes", what,
              q.str(), gate.str());
  const Sizes n{q.size(0), q.size(1),    q.size(2), gate.size(3), q.size(2) / std::max<int64_t>(1, gate.size(3)),
                q.size(3), q.size(3) / 2};
  TRIAD_CHECK(n.Hkv > 0 && n.Hq % n.Hkv == 0, "{}: {} query heads are not a multiple of {} groups", what, n.Hq, n.Hkv);
  check_tensor(what, gate, {3, n.B, n.T, n.Hkv}, acc_dtype(q.dtype));
  return n;
}

// at: element (branch, b, i, h) in a tensor [3,B,T,H], where i is the token. head: the address of row (b, i, h) in a
// tensor [B,T,H,D] or [B,T,H].
template <class A, class TensorType>
auto& at(const TensorType& t, int64_t branch, int64_t b, int64_t i, int64_t h) {
  return t.template ptr<A>()[branch * t.stride[0] + b * t.stride[1] + i * t.stride[2] + h * t.stride[3]];
}
template <class T, class TensorType>
auto* head(const TensorType& t, int64_t b, int64_t i, int64_t h) {
  return t.template ptr<T>() + b * t.stride[0] + i * t.stride[1] + h * t.stride[2];
}

// The gate MLP's steps for one token and group (b, t, g), in the accumulator type.
template <class T>
struct GateMlp {
  using A = acc_t<T>;
  int64_t dk, hidden;
  ConstTensor fc1_w, fc2_w;
  const T *fc1_b, *fc2_b;
  A inverse_temperature;

  GateMlp(const GateWeights& w, const GateOptions& o)
      : dk(w.fc1_w.size(1)),
        hidden(w.fc1_w.size(0)),
        fc1_w(w.fc1_w),
        fc2_w(w.fc2_w),
        fc1_b(w.fc1_b.ptr<T>()),
        fc2_b(w.fc2_b.ptr<T>()),
        inverse_temperature(static_cast<A>(1.0 / o.temperature)) {}
  const T* fc1_row(int64_t j) const { return fc1_w.ptr<T>() + j * fc1_w.stride[0]; }
  const T* fc2_row(int64_t k) const { return fc2_w.ptr<T>() + k * fc2_w.stride[0]; }

  // mean [dk] = q averaged over the group's G heads
  void mean_of_heads(A* mean, const ConstTensor& q, int64_t b, int64_t t, int64_t g, int64_t G) const {
    std::fill_n(mean, dk, A{0});
    for (int64_t r = 0; r < G; ++r) {
      if (t + kPrefetchTokens < q.size(1)) prefetch_row(head<T>(q, b, t + kPrefetchTokens, g * G + r), dk);
      axpy(mean, A{1}, head<T>(q, b, t, g * G + r), dk);
    }
    for (int64_t i = 0; i < dk; ++i) mean[i] *= A{1} / static_cast<A>(G);
  }
  // pre [hidden] = fc1(mean) + b1
  void first_layer(A* pre, const A* mean) const {
    for (int64_t j = 0; j < hidden; ++j) pre[j] = dot<A>(mean, fc1_row(j), dk) + static_cast<A>(fc1_b[j]);
  }
  // Returns the gates, given pre [hidden], which is replaced by SiLU(pre).
  std::array<A, 3> gates(A* pre, GateKind kind) const {
#pragma omp simd
    for (int64_t j = 0; j < hidden; ++j) pre[j] *= sigmoid_of(pre[j]);
    std::array<A, 3> z;
    for (int k = 0; k < 3; ++k)
      z[k] = inverse_temperature * (dot<A>(pre, fc2_row(k), hidden) + static_cast<A>(fc2_b[k]));
    if (kind == GateKind::sigmoid) return {sigmoid_of(z[0]), sigmoid_of(z[1]), sigmoid_of(z[2])};
    const A max = std::max({z[0], z[1], z[2]});
    for (A& x : z) x = std::exp(x - max);
    const A sum = z[0] + z[1] + z[2];
    return {z[0] / sum, z[1] / sum, z[2] / sum};
  }
  // Returns fc2's output gradient, given the gates and their gradient.
  std::array<A, 3> logit_gradient(const std::array<A, 3>& gate, const std::array<A, 3>& dgate, GateKind kind) const {
    const A mean = gate[0] * dgate[0] + gate[1] * dgate[1] + gate[2] * dgate[2];
    std::array<A, 3> dz;
    for (int k = 0; k < 3; ++k)
      dz[k] = inverse_temperature * gate[k] * (kind == GateKind::softmax ? dgate[k] - mean : dgate[k] * (1 - gate[k]));
    return dz;
  }
};

template <class T>
void gate_forward_cpu(Context& ctx, Tensor gate, ConstTensor q, const GateWeights& w, const GateOptions& o) {
  using A = acc_t<T>;
  const Sizes n = check_gate("nsa_gate", gate, q);
  const GateMlp<T> mlp(w, o);
  parallel_for(ctx, n.B * n.T, [&](int64_t i) {
    const int64_t t = i % n.T, b = i / n.T;
    static thread_local std::vector<A> buffer;
    buffer.resize(static_cast<size_t>(n.dk + n.hidden));
    A *mean = buffer.data(), *pre = mean + n.dk;
    for (int64_t g = 0; g < n.Hkv; ++g) {
      std::array<A, 3> value{};
      if (o.force != Branch::none) {
        value[static_cast<size_t>(o.force)] = 1;
      } else if (o.uniform) {
        value.fill(A{1} / A{3});
      } else {
        mlp.mean_of_heads(mean, q, b, t, g, n.G);
        mlp.first_layer(pre, mean);
        value = mlp.gates(pre, o.kind);
      }
      for (int k = 0; k < 3; ++k) at<A>(gate, k, b, t, g) = value[k];
    }
  });
}

// How a row of weight gradient partials is laid out: fc1_w, fc1_b, fc2_w, fc2_b. Offsets in elements.
struct PartialLayout {
  int64_t fc1_b, fc2_w, fc2_b, size;
  PartialLayout(int64_t dk, int64_t hidden)
      : fc1_b(hidden * dk), fc2_w(fc1_b + hidden), fc2_b(fc2_w + 3 * hidden), size(fc2_b + 3) {}
};

// Adds weight gradients to a partial sum row, one token and group per add(). The constructor zeroes the row.
template <class T>
class GateGradient {
 public:
  using A = acc_t<T>;
  GateGradient(const GateMlp<T>& mlp, A* partial)
      : mlp_(mlp),
        layout_(mlp.dk, mlp.hidden),
        partial_(partial),
        buffer_(static_cast<size_t>(2 * (mlp.dk + mlp.hidden))) {
    std::fill_n(partial, layout_.size, A{0});
  }
  // Adds (b, t, g)'s gradients, given its gates and their gradient. Returns dmean [dk], the gradient of q's mean over
  // the heads, valid until the next call.
  const A* add(const ConstTensor& q, int64_t b, int64_t t, int64_t g, int64_t G, const std::array<A, 3>& gate,
               const std::array<A, 3>& dgate, GateKind kind) {
    const int64_t dk = mlp_.dk, hidden = mlp_.hidden;
    A *mean = buffer_.data(), *dmean = mean + dk, *pre = dmean + dk;
    mlp_.mean_of_heads(mean, q, b, t, g, G);
    mlp_.first_layer(pre, mean);
    const std::array<A, 3> dz = mlp_.logit_gradient(gate, dgate, kind);
    std::fill_n(dmean, dk, A{0});
    A *dpre = buffer_.data() + 2 * dk + hidden, *db1 = partial_ + layout_.fc1_b, *dw2 = partial_ + layout_.fc2_w;
    const T *w0 = mlp_.fc2_row(0), *w1 = mlp_.fc2_row(1), *w2 = mlp_.fc2_row(2);
#pragma omp simd
    for (int64_t j = 0; j < hidden; ++j) {
      const A s = sigmoid_of(pre[j]), act = pre[j] * s;
      const A dact = dz[0] * static_cast<A>(w0[j]) + dz[1] * static_cast<A>(w1[j]) + dz[2] * static_cast<A>(w2[j]);
      dw2[j] += dz[0] * act;
      dw2[j + hidden] += dz[1] * act;
      dw2[j + 2 * hidden] += dz[2] * act;
      dpre[j] = dact * s * (1 + pre[j] * (1 - s));
      db1[j] += dpre[j];
    }
    for (int64_t j = 0; j < hidden; ++j) {
      axpy(partial_ + j * dk, dpre[j], mean, dk);
      axpy(dmean, dpre[j], mlp_.fc1_row(j), dk);
    }
    for (int k = 0; k < 3; ++k) partial_[layout_.fc2_b + k] += dz[k];
    return dmean;
  }

 private:
  const GateMlp<T>& mlp_;
  const PartialLayout layout_;
  A* partial_;
  std::vector<A> buffer_;
};

template <class T>
void gate_backward_cpu(Context& ctx, Tensor dq_group, const GateGrads& grads, ConstTensor dgate, ConstTensor gate,
                       ConstTensor q, const GateWeights& w, const GateOptions& o) {
  using A = acc_t<T>;
  constexpr int64_t kPieces = 32;  // partial sums; a fixed number, so that threads don't change the summation order
  const Sizes n = check_gate("nsa_gate", gate, q);
  const GateMlp<T> mlp(w, o);
  const PartialLayout layout(n.dk, n.hidden);
  Scratch::Scope scope(ctx.scratch);
  const Tensor partials = scope.alloc(dtype_of<A>, {kPieces, layout.size});

  const int64_t tokens = n.B * n.T;
  parallel_for(ctx, kPieces, [&](int64_t piece) {
    GateGradient<T> gradient(mlp, partials.ptr<A>() + piece * layout.size);
    for (int64_t i = tokens * piece / kPieces; i < tokens * (piece + 1) / kPieces; ++i)
      for (int64_t g = 0; g < n.Hkv; ++g) {
        const int64_t t = i % n.T, b = i / n.T;
        std::array<A, 3> value, dvalue;
        for (int k = 0; k < 3; ++k) value[k] = at<A>(gate, k, b, t, g), dvalue[k] = at<A>(dgate, k, b, t, g);
        const A* dmean = gradient.add(q, b, t, g, n.G, value, dvalue, o.kind);
        A* to = head<A>(dq_group, b, t, g);
        for (int64_t j = 0; j < n.dk; ++j) to[j] = dmean[j] / static_cast<A>(n.G);
      }
  });

  auto add_column = [&](A& to, int64_t column) {
    for (int64_t piece = 0; piece < kPieces; ++piece) to += partials.ptr<A>()[piece * layout.size + column];
  };
  parallel_for(ctx, n.hidden, [&](int64_t j) {
    for (int64_t i = 0; i < n.dk; ++i) add_column(grads.fc1_w.ptr<A>()[j * grads.fc1_w.stride[0] + i], j * n.dk + i);
    add_column(grads.fc1_b.ptr<A>()[j], layout.fc1_b + j);
    for (int k = 0; k < 3; ++k)
      add_column(grads.fc2_w.ptr<A>()[k * grads.fc2_w.stride[0] + j], layout.fc2_w + k * n.hidden + j);
  });
  parallel_for(ctx, 3, [&](int64_t k) { add_column(grads.fc2_b.ptr<A>()[k], layout.fc2_b + k); });
}

template <class T>
void combine_forward_cpu(Context& ctx, Tensor out, const std::array<ConstTensor, 3>& o, ConstTensor gate,
                         const Sizes& n) {
  using A = acc_t<T>;
  parallel_for(ctx, n.B * n.T, [&](int64_t i) {
    const int64_t t = i % n.T, b = i / n.T;
    for (int64_t h = 0; h < n.Hq; ++h) {
      const A g0 = at<A>(gate, 0, b, t, h / n.G), g1 = at<A>(gate, 1, b, t, h / n.G),
              g2 = at<A>(gate, 2, b, t, h / n.G);
      const T *o0 = head<T>(o[0], b, t, h), *o1 = head<T>(o[1], b, t, h), *o2 = head<T>(o[2], b, t, h);
      T* to = head<T>(out, b, t, h);
      for (int64_t j = 0; j < out.size(3); ++j)
        to[j] = static_cast<T>(g0 * static_cast<A>(o0[j]) + g1 * static_cast<A>(o1[j]) + g2 * static_cast<A>(o2[j]));
    }
  });
}

template <class T>
void combine_backward_cpu(Context& ctx, Tensor dgate, Tensor delta, ConstTensor dout,
                          const std::array<ConstTensor, 3>& o, ConstTensor gate, const Sizes& n) {
  using A = acc_t<T>;
  parallel_for(ctx, n.B * n.T, [&](int64_t i) {
    const int64_t t = i % n.T, b = i / n.T;
    for (int64_t g = 0; g < n.Hkv; ++g)
      for (int k = 0; k < 3; ++k) {
        A sum = 0;
        for (int64_t h = g * n.G; h < (g + 1) * n.G; ++h) {
          const A a = dot<A>(head<T>(dout, b, t, h), head<T>(o[k], b, t, h), dout.size(3));
          at<A>(delta, k, b, t, h) = at<A>(gate, k, b, t, g) * a;
          sum += a;
        }
        at<A>(dgate, k, b, t, g) = sum;
      }
  });
}

// norm [B,T,H] = the Euclidean norm per row, of x [B,T,H,D].
template <class T>
void norms_cpu(Context& ctx, Tensor norm, ConstTensor x) {
  using A = acc_t<T>;
  const int64_t tokens = x.size(1), heads = x.size(2);
  parallel_for(ctx, x.size(0) * tokens, [&](int64_t i) {
    for (int64_t h = 0; h < heads; ++h) {
      const T* row = head<T>(x, i / tokens, i % tokens, h);
      *head<A>(norm, i / tokens, i % tokens, h) = std::sqrt(dot<A>(row, row, x.size(3)));
    }
  });
}

void check_norm(const char* what, const Tensor& norm, const ConstTensor& x) {
  if (!norm.empty()) check_tensor(what, norm, {x.size(0), x.size(1), x.size(2)}, acc_dtype(x.dtype));
}
void check_branches(const char* what, const std::array<ConstTensor, 3>& o, const ConstTensor& like) {
  for (const ConstTensor& branch : o) check_tensor(what, branch, like.shape(), like.dtype);
}

}  // namespace

void nsa_gate_forward(Context& ctx, Tensor gate, ConstTensor q, const GateWeights& w, const GateOptions& o) {
  const OpScope op_scope(ctx, "nsa_gate_forward");
  const Sizes n = check_gate("nsa_gate", gate, q);
  check_weights("nsa_gate: a weight", w, n.dk, n.hidden, q.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_gate_forward(ctx, gate, q, w, o);
  }
  dispatch_float(q.dtype, [&]<class T>() { gate_forward_cpu<T>(ctx, gate, q, w, o); });
}

void nsa_gate_backward(Context& ctx, Tensor dq_group, const GateGrads& grads, ConstTensor dgate, ConstTensor gate,
                       ConstTensor q, const GateWeights& w, const GateOptions& o) {
  const OpScope op_scope(ctx, "nsa_gate_backward");
  const Sizes n = check_gate("nsa_gate: gate", gate, q);
  check_gate("nsa_gate: dgate", dgate, q);
  check_tensor("nsa_gate: dq_group", dq_group, {n.B, n.T, n.Hkv, n.dk}, acc_dtype(q.dtype));
  if (!o.has_gradient()) return zero(ctx, dq_group);
  check_weights("nsa_gate: a weight", w, n.dk, n.hidden, q.dtype);
  check_weights("nsa_gate: a gradient", grads, n.dk, n.hidden, acc_dtype(q.dtype));
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_gate_backward(ctx, dq_group, grads, dgate, gate, q, w, o);
  }
  dispatch_float(q.dtype, [&]<class T>() { gate_backward_cpu<T>(ctx, dq_group, grads, dgate, gate, q, w, o); });
}

void nsa_combine_forward(Context& ctx, Tensor out, const std::array<ConstTensor, 3>& o, ConstTensor gate) {
  const OpScope op_scope(ctx, "nsa_combine_forward");
  const Sizes n = check_gate("nsa_combine", gate, out);
  check_branches("nsa_combine: a branch", o, out);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_combine_forward(ctx, out, o, gate);
  }
  dispatch_float(out.dtype, [&]<class T>() { combine_forward_cpu<T>(ctx, out, o, gate, n); });
}

void nsa_combine_backward(Context& ctx, Tensor dgate, Tensor delta, ConstTensor dout,
                          const std::array<ConstTensor, 3>& o, ConstTensor gate, Tensor out, Tensor dout_norm) {
  const OpScope op_scope(ctx, "nsa_combine_backward");
  const Sizes n = check_gate("nsa_combine: gate", gate, dout);
  check_gate("nsa_combine: dgate", dgate, dout);
  check_tensor("nsa_combine: delta", delta, {3, n.B, n.T, n.Hq}, acc_dtype(dout.dtype));
  check_branches("nsa_combine: a branch", o, dout);
  if (!out.empty()) check_tensor("nsa_combine: out", out, dout.shape(), dout.dtype);
  check_norm("nsa_combine: dout_norm", dout_norm, dout);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_combine_backward(ctx, dgate, delta, dout, o, gate, out, dout_norm);
  }
  dispatch_float(dout.dtype, [&]<class T>() {
    combine_backward_cpu<T>(ctx, dgate, delta, dout, o, gate, n);
    if (!out.empty()) combine_forward_cpu<T>(ctx, out, o, gate, n);
    if (!dout_norm.empty()) norms_cpu<T>(ctx, dout_norm, dout);
  });
}

void attention_delta(Context& ctx, Tensor delta, ConstTensor dout, ConstTensor o, Tensor dout_norm) {
  const OpScope op_scope(ctx, "attention_delta");
  TRIAD_CHECK(dout.rank == 4, "attention_delta: dout is {}, which has not four axes", dout.str());
  check_tensor("attention_delta: o", o, dout.shape(), dout.dtype);
  check_tensor("attention_delta: delta", delta, {dout.size(0), dout.size(1), dout.size(2)}, acc_dtype(dout.dtype));
  check_norm("attention_delta: dout_norm", dout_norm, dout);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::attention_delta(ctx, delta, dout, o, dout_norm);
  }
  dispatch_float(dout.dtype, [&]<class T>() {
    using A = acc_t<T>;
    const int64_t T_ = dout.size(1), H = dout.size(2);
    parallel_for(ctx, dout.size(0) * T_, [&](int64_t i) {
      for (int64_t h = 0; h < H; ++h)
        *head<A>(delta, i / T_, i % T_, h) =
            dot<A>(head<T>(dout, i / T_, i % T_, h), head<T>(o, i / T_, i % T_, h), dout.size(3));
    });
    if (!dout_norm.empty()) norms_cpu<T>(ctx, dout_norm, dout);
  });
}

}  // namespace triad
