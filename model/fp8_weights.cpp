#include "model/fp8_weights.h"

#include <algorithm>

#include "engine/check.h"

namespace triad {

namespace {

// Calls f(weight, cast) for each weight of a layer that has casts.
template <class Layer, class F>
void for_each_cast(const LayerTensors<ConstTensor>& w, Layer& casts, F&& f) {
  f(w.qkv, casts.qkv);
  f(w.out_proj, casts.out_proj);
  f(w.mlp_in, casts.mlp_in);
  f(w.mlp_out, casts.mlp_out);
}

// Takes parts of two flat tensors, one after the other; without tensors it only counts.
struct Pieces {
  Tensor bytes, scales;
  int64_t taken_bytes = 0, taken_scales = 0;

  E4m3Rows take(int64_t rows, int64_t columns) {
    const int64_t byte = taken_bytes, scale = taken_scales;
    taken_bytes += rows * columns, taken_scales += rows;
    if (bytes.empty()) return {};
    return {bytes.slice(0, byte, taken_bytes).view({rows, columns}), scales.slice(0, scale, taken_scales)};
  }
  LayerFp8 take(const LayerTensors<ConstTensor>& w) {
    LayerFp8 layer;
    for_each_cast(w, layer, [&](const ConstTensor& weight, Fp8Weight& cast) {
      if (!fits_fp8(weight)) return;
      const int64_t out = weight.size(0), in = weight.size(1);
      cast.rows = take(out, in), cast.columns = take(in, out);
    });
    return layer;
  }
};

}  // namespace

Fp8Weights::Fp8Weights(Context& ctx, Arena& arena, const ModelTensors<ConstTensor>& weights,
                       const std::vector<bool>& layers, bool in_turn)
    : used_(layers), casts_(layers.size()), in_turn_(in_turn) {
  if (std::ranges::find(layers, true) == layers.end()) return;
  if (const std::string why = why_no_fp8(ctx); !why.empty())
    fail_usage(
        "runtime.matmul_dtype is fp8: it needs a Hopper card (compute capability 9.0) and CUDA 12.9 or later, or the "
        "CPU, which computes the same in software; {}",
        why);
  const DType dtype = weights.embed.dtype;
  if (dtype != DType::bf16 && (ctx.device.is_cuda() || dtype != DType::f32))
    fail_usage("runtime.matmul_dtype is fp8: it needs bf16 weights and activations{}, and these are {}",
               ctx.device.is_cuda() ? "" : ", or on the CPU fp32 ones", name_of(dtype));
  const auto for_each_used = [&](auto&& f) {
    for (size_t i = 0; i < layers.size(); ++i)
      if (layers[i]) f(i);
  };
  int64_t bytes = 0, scales = 0;
  for_each_used([&](size_t i) {
    Pieces counted;
    counted.take(weights.layers[i]);
    bytes = in_turn ? std::max(bytes, counted.taken_bytes) : bytes + counted.taken_bytes;
    scales = in_turn ? std::max(scales, counted.taken_scales) : scales + counted.taken_scales;
  });
  const Pieces all = {arena.alloc(MemTag::params, "weights in e4m3", DType::u8, {bytes}),
                      arena.alloc(MemTag::params, "scales of weights in e4m3", DType::f32, {scales})};
  Pieces pieces = all;
  for_each_used([&](size_t i) {
    if (in_turn) pieces = all;
    casts_[i] = pieces.take(weights.layers[i]);
  });
}

void Fp8Weights::cast(Context& ctx, int64_t layer, const LayerTensors<ConstTensor>& weights,
                      const Tensor& counts) const {
  const LayerFp8* const casts = of(layer);
  if (casts == nullptr) return;
  for_each_cast(weights, *casts, [&](const ConstTensor& weight, const Fp8Weight& cast) {
    if (cast.empty()) return;
    cast_weight_e4m3(ctx, cast.rows, cast.columns, weight);
    if (counts.empty()) return;
    count_e4m3(ctx, counts[Fp8Role::weight_rows], cast.rows);
    count_e4m3(ctx, counts[Fp8Role::weight_columns], cast.columns);
  });
}

}  // namespace triad
