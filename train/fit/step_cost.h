// A simple model for a step's time, which compares one config's settings before a run. It doesn't predict tokens/s.
// Pure functions.
#pragma once
#include <cstdint>

#include "model/flops.h"
#include "train/config/config.h"

namespace triad {

// H200 rates, in eight-GPU hosts with NVLink and a network adapter per GPU. To compare settings, only their ratios
// matter. By NVIDIA's DGX H200 data sheet, a GPU's NVLink has 450 GB/s each way, and its adapter 50 GB/s; collectives
// reach part of that.
struct CardRates {
  double flops = 400e12;                // FLOP/s in a step
  double memory = 4e12;                 // bytes/s in kernels that only read and write memory
  double few_ctas = 60e9;               // NCCL's bytes/s within a host with few CTAs
  double host = 200e9, network = 40e9;  // bytes/s in one rank's collectives: within a host; across hosts
  int64_t host_ranks = 8;               // more ranks are on several hosts
  double layer_s = 2e-4;                // launches, and kernels too small to fill the card; per layer and micro-step
  double shown = 0.1;                   // least share of communication that doesn't overlap
  double update_bytes = 30;             // what AdamW reads and writes per parameter
  double accumulate_bytes = 8;          // a gradient read and written, per parameter and further micro-step

  double links(int64_t ranks) const { return ranks > host_ranks ? network : host; }
};
inline constexpr CardRates kH200Rates;

// One rank's seconds per token, in parts.
struct StepCost {
  double compute = 0;        // FLOPs without recomputation
  double recompute = 0;      // recomputed FLOPs; `pointwise` bytes
  double communication = 0;  // gradients and weights: the part that doesn't overlap with computation
  double exchange = 0;       // ranks that share sequences: all exchanges, as if none overlapped
  double overhead = 0;       // small kernels and gradient sums per micro-step; the update per step
  // The part of `exchange` that shows, if exchanges overlap with computation as gradient sums do (below).
  double exchange_shown() const;
  double total() const { return compute + recompute + communication + exchange + overhead; }
};

// Bytes that one rank sends in a micro-step's forward and backward; last: the step's last micro-step. Within its
// replica (dist.replicas):
//   dist.zero 0: the last micro-step sums the gradients (sends them twice: reduce-scatter and all-gather).
//   1: the last micro-step scatters the sums, and the next forward gathers the new weights.
//   2: every micro-step scatters the sums.
//   3: every micro-step also gathers the weights, in forward and in backward.
// And to other replicas, whenever its part of the gradients is summed, that part twice, in fp32.
struct BytesSent {
  double within = 0, to_others = 0;
};
BytesSent bytes_sent(const Config&, int64_t ranks, bool last);

// The cost of a step on `ranks` ranks. Communication overlaps with half its micro-step's computation, and at least
// kH200Rates.shown of it shows; the total has exchanges without overlap. Larger micro-batches have fewer micro-steps
// per token, and so less overhead and, with dist.zero 2 and 3, less communication. Never falls when more is recomputed.
// exchanged: bytes in a micro-step's exchanges (most_bytes() in planned_exchanges.h).
StepCost step_cost(const Config&, int64_t ranks, const DocumentMix& = {}, int64_t exchanged = 0);

}  // namespace triad
