// Recomputation: some layers keep fewer tensors in forward and compute them again in backward, which saves memory. The
// gradients have the same bits either way.
#pragma once
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "engine/fields.h"

namespace triad {

// Which part of its forward a layer computes again in backward. Selection lists are always kept: backward treats them
// as constants, and they are small.
enum class Recompute : uint8_t {
  none,
  pointwise,  // q and k's norm and rotation, with model.qk_norm: no matrix product
  mlp,        // the MLP's norm and first matrix product
  attention,  // norm, q, k, v, branches and gates; not out_proj
  block,      // all but the MLP's last product, so that only the layer's input is kept
};

template <>
struct EnumWords<Recompute> {
  static constexpr std::pair<std::string_view, Recompute> words[] = {{"none", Recompute::none},
                                                                     {"pointwise", Recompute::pointwise},
                                                                     {"mlp", Recompute::mlp},
                                                                     {"attention", Recompute::attention},
                                                                     {"block", Recompute::block}};
};

// Parts of a layer's forward that can be computed again, in forward order.
enum class LayerPart : uint8_t {
  attention,  // writes qkv, the branches' o and lse, k_cmp, v_cmp and gate
  qk,         // part of attention, with model.qk_norm: reads qkv, writes qk
  out_proj,   // writes x_mid
  mlp_in,     // writes mlp_pre
};
inline constexpr LayerPart kLayerParts[] = {LayerPart::attention, LayerPart::qk, LayerPart::out_proj,
                                            LayerPart::mlp_in};

// Whether `recompute` includes a part, so that the tensors written by the part need not be kept.
constexpr bool covers(Recompute recompute, LayerPart part) {
  constexpr bool kCovers[][std::size(kLayerParts)] = {
      // Columns: attention, qk, out_proj, mlp_in. Rows: Recompute's values.
      {false, false, false, false},  // none
      {false, true, false, false},   // pointwise
      {false, false, false, true},   // mlp
      {true, true, false, false},    // attention
      {true, true, true, true},      // block
  };
  return kCovers[static_cast<size_t>(recompute)][static_cast<size_t>(part)];
}

// Each layer's Recompute setting.
class RecomputePlan {
 public:
  RecomputePlan() = default;  // no layer recomputes anything
  // Parses one word for all layers, or layer ranges with exclusive ends, such as "0:6=block,6:12=mlp"; layers outside
  // the ranges keep everything. Throws a UsageError that begins with `key` for any other text, and for layers that do
  // not exist or are named twice.
  static RecomputePlan parse(std::string_view text, int64_t n_layers, std::string_view key = "runtime.recompute");

  Recompute of(int64_t layer) const {
    return layer < static_cast<int64_t>(layers_.size()) ? layers_[static_cast<size_t>(layer)] : Recompute::none;
  }
  // Whether backward computes a part of a layer again. The last layer that recomputes the part does not: until its
  // backward, the buffers that layers share have its forward values.
  bool replays(int64_t layer, LayerPart) const;
  void set(int64_t begin, int64_t end, Recompute recompute);
  std::string str() const;  // the plan in the syntax that parse() reads

 private:
  std::vector<Recompute> layers_;
};

}  // namespace triad
