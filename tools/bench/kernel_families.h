// The families in which `triad bench step` sums kernels, and the matrix products that each computes.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "tools/bench/kernel_trace.h"
#include "train/config/config.h"

namespace triad {

// A kernel family. `ops`: name prefixes for ops that queue its kernels. `kernels`: name prefixes for its kernels that
// no op has queued. Families are in table order.
struct KernelFamily {
  const char* name;
  std::vector<const char*> ops, kernels = {};
};
const std::vector<KernelFamily>& kernel_families();
std::string family_of(const Activity&);

// Returns the FLOPs that one card computes per step, by family name (a group of kernels, see kernel_families()). Only
// families whose work is mainly matrix products have an entry. Attention FLOPs follow from the number of (query, key)
// pairs. Backward counts as five products for each pair, even if the kernels compute more.
std::map<std::string, double> family_flops(const Config&);
// Returns the share of a sequence's FLOPs that one card computes; dist.context cards compute it together.
double share_of(const Config&);

}  // namespace triad
