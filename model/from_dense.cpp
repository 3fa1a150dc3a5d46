#include "model/from_dense.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "engine/process/counted.h"

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

std::string describe_fresh(std::span<const ParamSpec> fresh) {
  if (fresh.empty()) return "";
  struct Kind {
    const char* name;
    bool (*holds)(ParamRole);
  };
  constexpr Kind kKinds[] = {{"gates", is_gate}, {"phi", is_phi}, {"index", is_index}};
  std::vector<std::string> kinds;
  for (const Kind& kind : kKinds)
    if (std::ranges::any_of(fresh, kind.holds, &ParamSpec::role)) kinds.push_back(kind.name);
  return fmt::format("{} {} fresh ({})", counted(static_cast<int64_t>(fresh.size()), "tensor"),
                     fresh.size() == 1 ? "begins" : "begin", fmt::join(kinds, ", "));
}

}  // namespace triad
