#include "model/from_dense.h"

#include <fmt/format.h>

namespace triad {

std::string dense_source(const ParamSpec& spec) {
  if (is_gate(spec.role) || is_phi(spec.role) || is_index(spec.role)) return "";
  std::string name = spec.name;
  for (const Branch branch : {Branch::cmp, Branch::sel}) {
    // All names for one branch's keys and values: attn.k_cmp_proj.weight, attn.k_cmp_norm.weight, ...
    for (const char letter : {'k', 'v'}) {
      const std::string part = fmt::format("attn.{}_{}_", letter, word_of(branch));
      const size_t at = name.find(part);
      if (at != std::string::npos) return name.replace(at, part.size(), fmt::format("attn.{}_win_", letter));
    }
  }
  return name;
}

}  // namespace triad
