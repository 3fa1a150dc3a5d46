// Fp8Weights: the weights of linear layers in e4m3 (runtime.matmul_dtype fp8), cast from those that the model holds.
#pragma once
#include <vector>

#include "kernels/ops/linear_fp8.h"
#include "model/params.h"

namespace triad {

// What is cast to e4m3, over all layers: each linear layer's input x and its result's gradient dy, and the weights by
// row and by column.
struct Fp8Role {
  enum : int64_t {
    qkv_x,
    qkv_dy,
    out_proj_x,
    out_proj_dy,
    mlp_in_x,
    mlp_in_dy,
    mlp_out_x,
    mlp_out_dy,
    weight_rows,
    weight_columns,
    count
  };
};
inline constexpr const char* kFp8RoleNames[Fp8Role::count] = {
    "qkv_x",     "qkv_dy",    "out_proj_x", "out_proj_dy", "mlp_in_x",
    "mlp_in_dy", "mlp_out_x", "mlp_out_dy", "weight_rows", "weight_columns"};

// A layer's casts. A weight that does not fit fp8 products has an empty one.
struct LayerFp8 {
  Fp8Weight qkv, out_proj, mlp_in, mlp_out;
};

class Fp8Weights {
 public:
  Fp8Weights() = default;  // no layer multiplies in fp8
  // layers: whether a layer multiplies in fp8. in_turn: all layers use the same memory, as their weights do in a ring.
  Fp8Weights(Context&, Arena&, const ModelTensors<ConstTensor>& weights, const std::vector<bool>& layers, bool in_turn);

  // Null if the layer multiplies in the compute dtype.
  const LayerFp8* of(int64_t layer) const {
    return layer >= 0 && layer < static_cast<int64_t>(used_.size()) && used_[static_cast<size_t>(layer)]
               ? &casts_[static_cast<size_t>(layer)]
               : nullptr;
  }
  // Whether casts last only until another layer's.
  bool in_turn() const { return in_turn_; }
  // Casts a layer's weights; does nothing if the layer does not multiply in fp8. counts [Fp8Role::count,
  // E4m3Counts::count] f64: count_e4m3() of the weights, added to; absent: they are not counted.
  void cast(Context&, int64_t layer, const LayerTensors<ConstTensor>& weights, const Tensor& counts = {}) const;

 private:
  std::vector<bool> used_;
  std::vector<LayerFp8> casts_;
  bool in_turn_ = false;
};

}  // namespace triad
