// Recomputation: some layers keep fewer tensors in forward and compute them again in backward, which saves memory. The
// gradients have the same bits either way.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/fields.h"

namespace triad {

// The part of its forward that a layer computes again in backward. Selection lists are always kept: backward treats
// them as constants, and they are small.
enum class Recompute : uint8_t {
  none,
  mlp,        // norm and first matrix product of the MLP
  attention,  // norm, q, k, v, branches and gates; not out_proj
  block,      // all but the MLP's last product, so that only the layer's input is kept
};

template <>
struct EnumWords<Recompute> {
  static constexpr std::pair<std::string_view, Recompute> words[] = {{"none", Recompute::none},
                                                                     {"mlp", Recompute::mlp},
                                                                     {"attention", Recompute::attention},
                                                                     {"block", Recompute::block}};
};

// The parts of a layer's forward that can be computed again, in the order of forward.
enum class LayerPart : uint8_t {
  attention,  // writes qkv, the branches' o and lse, k_cmp, v_cmp and gate
  out_proj,   // writes x_mid
  mlp_in,     // writes mlp_pre
};

// Whether `recompute` includes a part, so that the tensors written by the part need not be kept.
constexpr bool covers(Recompute recompute, LayerPart part) {
  constexpr bool kCovers[][3] = {
      // Columns: attention, out_proj, mlp_in. Rows: the values of Recompute.
      {false, false, false},  // none
      {false, false, true},   // mlp
      {true, false, false},   // attention
      {true, true, true},     // block
  };
  return kCovers[static_cast<size_t>(recompute)][static_cast<size_t>(part)];
}

// The Recompute setting of each layer.
class RecomputePlan {
 public:
  RecomputePlan() = default;  // no layer recomputes anything
  // Parses one word for all layers, or ranges of layers with exclusive ends, such as "0:6=block,6:12=mlp"; layers
  // outside the ranges keep everything. Throws a UsageError that begins with `key` for any other text, and for layers
  // that do not exist or are named twice.
  static RecomputePlan parse(std::string_view text, int64_t n_layers, std::string_view key = "runtime.recompute");

  Recompute of(int64_t layer) const {
    return layer < static_cast<int64_t>(layers_.size()) ? layers_[static_cast<size_t>(layer)] : Recompute::none;
  }
  void set(int64_t begin, int64_t end, Recompute recompute);
  std::string str() const;  // the plan in the syntax that parse() reads

 private:
  std::vector<Recompute> layers_;
};

}  // namespace triad
