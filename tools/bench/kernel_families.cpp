#include "tools/bench/kernel_families.h"

#include "model/flops.h"

namespace triad {

double share_of(const Config& config) { return 1.0 / static_cast<double>(config.dist.context); }

const std::vector<KernelFamily>& kernel_families() {
  static const std::vector<KernelFamily> all = {
      {"compress", {"nsa_compress"}},
      {"compressed forward", {"nsa_attend_compressed_forward"}},
      {"compressed backward", {"nsa_attend_compressed_backward"}},
      {"select", {"nsa_select"}},
      {"index loss", {"nsa_index"}},
      {"selected forward", {"nsa_attend_selected_forward"}},
      {"selected backward", {"nsa_attend_selected_backward"}},
      {"window forward", {"nsa_attend_window_forward"}},
      {"window backward", {"nsa_attend_window_backward"}},
      {"dense forward", {"dense_attention_forward"}},
      {"dense backward", {"dense_attention_backward"}},
      {"gate", {"nsa_gate", "nsa_combine"}},
      {"dq rounding unit", {"attend_rounding_unit"}},
      {"gate and list stats", {"nsa_stats"}},
      {"matmul", {"matmul", "linear_silu", "linear_swiglu", "column_sum"}},
      {"adapters", {"lora"}},
      {"classifier", {"classifier"}},
      {"norm", {"rmsnorm", "qk_norm"}},
      {"rope", {"rope"}},
      {"shared k and v", {"branch_sum"}},
      {"activation", {"silu", "swiglu"}},
      {"embedding", {"embedding"}},
      {"optimizer", {"adamw", "muon", "newton_schulz", "sum", "judge", "accumulate"}},
      {"exchange", {"context_exchange"}},                // keys, values and their gradients, between ranks
      {"rows of exchanges", {"copy_rows", "add_rows"}},  // packed, unpacked and added
      {"collectives", {"rank_sum"}, {"nccl"}},           // gradient sums, weight gathers
      {"cast", {"cast_rows_e4m3", "cast_columns_e4m3", "count_e4m3"}},  // casts to fp8
      {"transpose", {"transpose_e4m3"}},                                // operands of fp8 weight gradients
      {"copies", {"cast"}, {"copy", "fill"}},
      {"other", {}}};
  return all;
}

std::string family_of(const Activity& a) {
  for (const KernelFamily& family : kernel_families())
    for (const char* name : a.op.empty() ? family.kernels : family.ops)
      if ((a.op.empty() ? a.kernel : a.op).starts_with(name)) return family.name;
  return "other";
}

std::map<std::string, double> family_flops(const Config& config) {
  const ModelConfig& c = config.model;
  const TrainConfig& t = config.train;
  const int64_t B = t.micro_batch_size * t.accumulate_grad_batches;
  const double share = share_of(config);
  const ProductFlops products = product_flops(c, B, t.seq_len);
  AttendedPairs pairs;             // attended pairs per head and sequence, in all layers
  double scored = 0;               // pairs scored by the selections' heads
  double indexed = 0, taught = 0;  // pairs per group that an index scores, and that teach it, each times its width
  for (int64_t i = 0; i < c.n_layers; ++i) {
    const AttendedPairs p = attended_pairs(c, i, t.seq_len);
    pairs.cmp += p.cmp, pairs.sel += p.sel, pairs.win += p.win, pairs.dense += p.dense;
    const double width = c.has_index(i) ? static_cast<double>(c.nsa_at(i).d_index) : 0;
    indexed += width * p.index, taught += width * p.sel;
    scored += c.has_index(i) ? 0 : p.cmp;
  }
  const double heads = static_cast<double>(B * c.n_heads) * share;
  const double dk = static_cast<double>(c.d_k), dv = static_cast<double>(c.d_v);
  const double index = 2 * static_cast<double>(B * c.n_kv_groups) * share;
  const double forward = 2 * heads * (dk + dv), backward = 2 * heads * (3 * dk + 2 * dv);
  return {{"matmul", products.layers * share},
          {"classifier", products.head * share},
          {"compressed forward", pairs.cmp * forward},
          {"compressed backward", pairs.cmp * backward},
          {"select", scored * 2 * heads * dk + indexed * index},
          {"index loss", taught * 4 * index},
          {"selected forward", pairs.sel * forward},
          {"selected backward", pairs.sel * backward},
          {"window forward", pairs.win * forward},
          {"window backward", pairs.win * backward},
          {"dense forward", pairs.dense * forward},
          {"dense backward", pairs.dense * backward}};
}

}  // namespace triad
