// Recomputation: which layers keep less than they could from forward, and run part of it again in backward. The bits of
// the gradients are the same either way.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/fields.h"

namespace triad {

// What a layer runs again. Its selection lists are always kept: constants of backward, and few bytes.
enum class Recompute : uint8_t {
  none,
  mlp,        // the MLP up to its activation: norm, first product
  attention,  // norm, q, k and v, the branches and gates; not the product after them
  block,      // all but the MLP's last product: the layer keeps its input alone
};

template <>
struct EnumWords<Recompute> {
  static constexpr std::pair<std::string_view, Recompute> words[] = {{"none", Recompute::none},
                                                                     {"mlp", Recompute::mlp},
                                                                     {"attention", Recompute::attention},
                                                                     {"block", Recompute::block}};
};

constexpr bool replays_attention(Recompute r) { return r == Recompute::attention || r == Recompute::block; }
constexpr bool replays_mlp(Recompute r) { return r == Recompute::mlp || r == Recompute::block; }

// One word a layer.
class RecomputePlan {
 public:
  RecomputePlan() = default;  // none
  // A word for all layers, or ranges of them, the end left out: "0:6=block,6:12=mlp"; layers that none names keep all.
  // Throws UsageError that begins with `key` for anything else, for layers that are not there or are named twice.
  static RecomputePlan parse(std::string_view text, int64_t n_layers, std::string_view key = "runtime.recompute");

  Recompute of(int64_t layer) const {
    return layer < static_cast<int64_t>(layers_.size()) ? layers_[static_cast<size_t>(layer)] : Recompute::none;
  }
  void set(int64_t begin, int64_t end, Recompute recompute);
  std::string str() const;  // as parse reads it

 private:
  std::vector<Recompute> layers_;
};

}  // namespace triad
