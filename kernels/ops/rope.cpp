// Rotary position embedding on the CPU, and the angle table for both devices.
#include "kernels/ops/rope.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

// Per pair, the share that the unchanged frequency has when it is mixed with the frequency slowed down by o.factor.
std::vector<double> unchanged_shares(const std::vector<double>& radians, int64_t head_dim, const RopeOptions& o) {
  std::vector<double> shares;
  const auto original = static_cast<double>(o.original_len), dim = static_cast<double>(head_dim);
  if (o.scaling == RopeScaling::llama3) {
    for (const double f : radians) {
      const double turns = original * f / (2 * std::numbers::pi);
      shares.push_back(std::clamp((turns - o.low_freq) / (o.high_freq - o.low_freq), 0.0, 1.0));
    }
    return shares;
  }
  // yarn: the (real) index of the pair that makes this many turns within the original length.
  const auto index = [&](double turns) {
    return dim * std::log(original / (turns * 2 * std::numbers::pi)) / (2 * std::log(o.theta));
  };
  constexpr double kLeastWidth = 1e-3;
  const double first = std::max(std::floor(index(o.beta_fast)), 0.0),
               last = std::min(std::ceil(index(o.beta_slow)), dim - 1), width = last - first;
  for (size_t j = 0; j < radians.size(); ++j) {
    const double ramp = (static_cast<double>(j) - first) / (width == 0 ? kLeastWidth : width);
    shares.push_back(1 - std::clamp(ramp, 0.0, 1.0));
  }
  return shares;
}

template <class A>
void fill_table(Context& ctx, Tensor cos, Tensor sin, int64_t head_dim, const RopeOptions& o) {
  const int64_t T = cos.size(0), half = head_dim / 2;
  const RopeFrequencies frequencies = rope_frequencies(head_dim, o);
  std::vector<A> cosines(static_cast<size_t>(ctx.planning ? 0 : T * half)), sines(cosines.size());
  parallel_for(ctx, T, [&](int64_t t) {
    for (int64_t j = 0; j < half; ++j) {
      const double angle = static_cast<double>(t) / o.scale * frequencies.radians[static_cast<size_t>(j)];
      cosines[static_cast<size_t>(t * half + j)] = static_cast<A>(frequencies.factor * std::cos(angle));
      sines[static_cast<size_t>(t * half + j)] = static_cast<A>(frequencies.factor * std::sin(angle));
    }
  });
  write(ctx, cos, cosines.data());
  write(ctx, sin, sines.data());
}

void check_rope(const ConstTensor& y, const ConstTensor& x, const ConstTensor& cos, const ConstTensor& sin) {
  TRIAD_CHECK(x.rank == 4 && x.size(3) % 2 == 0, "rope: {} is not [B,T,H,D] with an even D", x.str());
  check_tensor("rope: result", y, x.shape(), y.dtype);
  TRIAD_CHECK(x.dtype == y.dtype || x.dtype == acc_dtype(y.dtype), "rope: {} is to be rotated into {}", x.str(),
              y.str());
  TRIAD_CHECK(cos.rank == 2 && cos.size(0) >= x.size(1), "rope: the table {} is too short for {}", cos.str(), x.str());
  check_tensor("rope: cos", cos, {cos.size(0), x.size(3) / 2}, acc_dtype(y.dtype));
  check_tensor("rope: sin", sin, cos.shape(), cos.dtype);
  TRIAD_CHECK(x.size(0) * x.size(1) <= std::numeric_limits<int32_t>::max(), "rope: the tokens of {} are too many",
              x.str());
}

// Rotates all of token t's heads in x [B,T,H,D] into y, which may be x, since each pair is read before it is written.
// sign: +1 forward, -1 backward. group [B,T,H/G,D], if present, is first added to x.
template <class T, class In>
void rotate_token(const Tensor& y_out, const ConstTensor& x_in, const ConstTensor& group_in, const acc_t<T>* cos,
                  const acc_t<T>* sin, acc_t<T> sign, int64_t b, int64_t t) {
  using A = acc_t<T>;
  const int64_t H = x_in.size(2), half = x_in.size(3) / 2, G = group_in.empty() ? 1 : H / group_in.size(2);
  for (int64_t h = 0; h < H; ++h) {
    const In* x = x_in.ptr<In>() + b * x_in.stride[0] + t * x_in.stride[1] + h * x_in.stride[2];
    T* y = y_out.ptr<T>() + b * y_out.stride[0] + t * y_out.stride[1] + h * y_out.stride[2];
    if (t + kPrefetchTokens < x_in.size(1)) prefetch_row(x + kPrefetchTokens * x_in.stride[1], 2 * half);
    if (group_in.empty()) {
#pragma omp simd
      for (int64_t j = 0; j < half; ++j) {
        const A first = static_cast<A>(x[j]), second = static_cast<A>(x[j + half]), s = sign * sin[j];
        y[j] = static_cast<T>(first * cos[j] - second * s);
        y[j + half] = static_cast<T>(second * cos[j] + first * s);
      }
    } else {
      const A* group = group_in.ptr<A>() + b * group_in.stride[0] + t * group_in.stride[1] + h / G * group_in.stride[2];
#pragma omp simd
      for (int64_t j = 0; j < half; ++j) {
        const A first = static_cast<A>(x[j]) + group[j], second = static_cast<A>(x[j + half]) + group[j + half];
        const A s = sign * sin[j];
        y[j] = static_cast<T>(first * cos[j] - second * s);
        y[j + half] = static_cast<T>(second * cos[j] + first * s);
      }
    }
  }
}

// A token's queries and keys are rotated in one iteration, since they are slices of the same row in memory.
template <class T, class In>
void rope_cpu(Context& ctx, Tensor y, ConstTensor x, ConstTensor group, const RopeKeys& keys, ConstTensor cos_in,
              ConstTensor sin_in, ConstTensor begin, int direction) {
  using A = acc_t<T>;
  const int64_t N = x.size(1);
  parallel_for(ctx, x.size(0) * N, [&](int64_t i) {
    const int64_t b = i / N, t = i % N;
    const int64_t at = begin.empty() ? t : t - begin.ptr<int32_t>()[b * begin.stride[0] + t];
    const A *cos = cos_in.ptr<A>() + at * cos_in.stride[0], *sin = sin_in.ptr<A>() + at * sin_in.stride[0];
    const A sign = static_cast<A>(direction);
    rotate_token<T, In>(y, x, group, cos, sin, sign, b, t);
    for (const Tensor& k : keys)
      if (!k.empty()) rotate_token<T, T>(k, k, {}, cos, sin, sign, b, t);
  });
}

void rope(Context& ctx, Tensor y, ConstTensor x, ConstTensor group, const RopeKeys& keys, ConstTensor cos,
          ConstTensor sin, ConstTensor begin, int direction) {
  check_rope(y, x, cos, sin);
  if (!begin.empty()) check_tensor("rope: begin", begin, {x.size(0), x.size(1)}, DType::i32);
  for (const Tensor& k : keys)
    if (!k.empty()) check_tensor("rope: keys", k, {x.size(0), x.size(1), k.size(2), x.size(3)}, y.dtype);
  if (!group.empty()) {
    check_tensor("rope: group", group, {x.size(0), x.size(1), group.size(2), x.size(3)}, acc_dtype(y.dtype));
    TRIAD_CHECK(x.size(2) % group.size(2) == 0, "rope: {} heads in {} groups", x.size(2), group.size(2));
  }
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::rope(ctx, y, x, group, keys, cos, sin, begin, direction);
  }
  dispatch_float(y.dtype, [&]<class T>() {
    if (x.dtype == y.dtype)
      rope_cpu<T, T>(ctx, y, x, group, keys, cos, sin, begin, direction);
    else
      rope_cpu<T, acc_t<T>>(ctx, y, x, group, keys, cos, sin, begin, direction);
  });
}

}  // namespace

RopeFrequencies rope_frequencies(int64_t head_dim, const RopeOptions& o) {
  RopeFrequencies out;
  for (int64_t j = 0; j < head_dim / 2; ++j)
    out.radians.push_back(std::pow(o.theta, -2.0 * static_cast<double>(j) / static_cast<double>(head_dim)));
  if (o.scaling == RopeScaling::none) return out;
  const std::vector<double> shares = unchanged_shares(out.radians, head_dim, o);
  for (size_t j = 0; j < shares.size(); ++j)
    out.radians[j] = out.radians[j] * shares[j] + out.radians[j] / o.factor * (1 - shares[j]);
  constexpr double kFactorOfLog = 0.1;
  if (o.scaling == RopeScaling::yarn) out.factor = kFactorOfLog * std::log(o.factor) + 1;
  return out;
}

void rope_table(Context& ctx, Tensor cos, Tensor sin, int64_t head_dim, const RopeOptions& o) {
  TRIAD_CHECK(head_dim > 0 && head_dim % 2 == 0 && o.theta > 0 && o.scale > 0,
              "rope_table: head_dim {}, theta {}, scale {}", head_dim, o.theta, o.scale);
  TRIAD_CHECK(cos.rank == 2 && (cos.dtype == DType::f64 || cos.dtype == DType::f32), "rope_table: cos is {}",
              cos.str());
  check_tensor("rope_table: cos", cos, {cos.size(0), head_dim / 2}, cos.dtype);
  check_tensor("rope_table: sin", sin, cos.shape(), cos.dtype);
  if (cos.dtype == DType::f64)
    fill_table<double>(ctx, cos, sin, head_dim, o);
  else
    fill_table<float>(ctx, cos, sin, head_dim, o);
}

void rope_forward(Context& ctx, Tensor y, ConstTensor x, ConstTensor cos, ConstTensor sin, const RopeKeys& keys,
                  ConstTensor begin) {
  const OpScope op_scope(ctx, "rope_forward");
  check_tensor("rope: x", x, x.shape(), y.dtype);
  rope(ctx, y, x, {}, keys, cos, sin, begin, +1);
}

void rope_backward(Context& ctx, Tensor dx, ConstTensor dy, ConstTensor cos, ConstTensor sin, const RopeKeys& dkeys,
                   ConstTensor dy_group, ConstTensor begin) {
  const OpScope op_scope(ctx, "rope_backward");
  rope(ctx, dx, dy, dy_group, dkeys, cos, sin, begin, -1);
}

}  // namespace triad
