#include "model/config.h"

#include "engine/check.h"

namespace triad {

void ModelConfig::resolve() {
  if (mlp_hidden == 0) mlp_hidden = mlp == MlpKind::silu ? 4 * dim : (8 * dim / 3 + 63) / 64 * 64;
  if (n_heads % n_kv_groups != 0)
    fail_usage("model.n_kv_groups is {}, which does not divide model.n_heads {}", n_kv_groups, n_heads);
  if (d_k % 2 != 0) fail_usage("model.d_k is {}: it must be even, for the rotation turns pairs", d_k);
  if (!has_nsa()) return;
  if (nsa.l % nsa.d != 0) fail_usage("nsa.d is {}, which does not divide nsa.l {}", nsa.d, nsa.l);
  if (nsa.l_sel % nsa.d != 0) fail_usage("nsa.d is {}, which does not divide nsa.l_sel {}", nsa.d, nsa.l_sel);
  if (nsa.n_sel < nsa.init_blocks + nsa.local_blocks)
    fail_usage("nsa.n_sel is {}: at least init_blocks + local_blocks = {} are needed", nsa.n_sel,
               nsa.init_blocks + nsa.local_blocks);
  if (nsa.gate.uniform && nsa.gate.force != Branch::none)
    fail_usage("nsa.uniform_gate is true and nsa.force_branch is {}: only one of them can hold",
               word_of(nsa.gate.force));
}

}  // namespace triad
