// Recomputation: which layers keep fewer tensors in forward and compute them again in backward. The gradients have the
// same bits either way.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/fields.h"

namespace triad {

// What a layer computes again in backward. Its selection lists are always kept: they are constants of backward and
// small.
enum class Recompute : uint8_t {
  none,
  mlp,        // norm and first matrix product of the MLP
  attention,  // norm, q, k, v, branches and gates; not out_proj
  block,      // all but the MLP's last product: only the layer's input is kept
};

template <>
struct EnumWords<Recompute> {
  static constexpr std::pair<std::string_view, Recompute> words[] = {{"none", Recompute::none},
                                                                     {"mlp", Recompute::mlp},
                                                                     {"attention", Recompute::attention},
                                                                     {"block", Recompute::block}};
};

// The parts of a layer's forward that can be computed again, in order.
enum class LayerPart : uint8_t {
  attention,  // writes qkv, o and lse of the branches, k_cmp, v_cmp, gate
  out_proj,   // writes x_mid
  mlp_in,     // writes mlp_pre
};

// Whether `recompute` computes a part again, so that its tensors need not be kept.
constexpr bool covers(Recompute recompute, LayerPart part) {
  constexpr bool kCovers[][3] = {
      // attention, out_proj, mlp_in
      {false, false, false},  // none
      {false, false, true},   // mlp
      {true, false, false},   // attention
      {true, true, true},     // block
  };
  return kCovers[static_cast<size_t>(recompute)][static_cast<size_t>(part)];
}

// One Recompute per layer.
class RecomputePlan {
 public:
  RecomputePlan() = default;  // none
  // Parses one word for all layers, or ranges with exclusive ends: "0:6=block,6:12=mlp"; other layers keep everything.
  // Throws a UsageError that begins with `key` for any other text, and for layers that do not exist or are named twice.
  static RecomputePlan parse(std::string_view text, int64_t n_layers, std::string_view key = "runtime.recompute");

  Recompute of(int64_t layer) const {
    return layer < static_cast<int64_t>(layers_.size()) ? layers_[static_cast<size_t>(layer)] : Recompute::none;
  }
  void set(int64_t begin, int64_t end, Recompute recompute);
  std::string str() const;  // in the syntax of parse()

 private:
  std::vector<Recompute> layers_;
};

}  // namespace triad
