// A simple model of a step's time, which compares settings of one config before a run. It is no prediction of tokens/s.
// Pure functions.
#pragma once
#include <cstdint>

#include "model/flops.h"
#include "train/config/config.h"

namespace triad {

// Rates of H200 GPUs, in hosts of eight with NVLink and a network adapter for each GPU. To compare settings, only their
// ratios matter. By NVIDIA's data sheet of the DGX H200, a GPU's NVLink has 450 GB/s each way, and its adapter 50 GB/s;
// collectives reach a part of that.
struct CardRates {
  double flops = 400e12;                // FLOP/s of a step
  double memory = 4e12;                 // bytes/s of kernels that only read and write memory
  double few_ctas = 60e9;               // bytes/s of NCCL within a host with few CTAs
  double host = 200e9, network = 40e9;  // bytes/s of one rank's collectives within a host; of several hosts
  int64_t host_ranks = 8;               // more ranks are on several hosts
  double layer_s = 2e-4;                // per layer and micro-step: launches, and kernels too small to fill the card
  double shown = 0.1;                   // the least share of communication that does not overlap
  double update_bytes = 30;             // per parameter: what AdamW reads and writes
  double accumulate_bytes = 8;          // per parameter and further micro-step: its gradient is read and written

  double links(int64_t ranks) const { return ranks > host_ranks ? network : host; }
};
inline constexpr CardRates kH200Rates;

// Seconds per token of one rank, in parts.
struct StepCost {
  double compute = 0;        // FLOPs without recomputation
  double recompute = 0;      // recomputed FLOPs; bytes of `pointwise`
  double communication = 0;  // of gradients and weights: the part that does not overlap with computation
  double exchange = 0;       // of ranks that share sequences: all of it, as if none overlapped
  double overhead = 0;       // per micro-step: small kernels, and sums of gradients; per step: the update
  // The part of `exchange` that shows, if exchanges overlap with computation as the sums of gradients do (below).
  double exchange_shown() const;
  double total() const { return compute + recompute + communication + exchange + overhead; }
};

// Bytes that one rank sends in a micro-step's forward and backward; last: the step's last micro-step. Within its
// replica (dist.replicas):
//   dist.zero 0: the last micro-step sums the gradients (sends them twice: reduce-scatter and all-gather).
//   1: the last micro-step scatters the sums, and the next forward gathers the new weights.
//   2: every micro-step scatters the sums.
//   3: every micro-step also gathers the weights, in forward and in backward.
// And to other replicas, with each sum of its part of the gradients, that part twice, in fp32.
struct BytesSent {
  double within = 0, to_others = 0;
};
BytesSent bytes_sent(const Config&, int64_t ranks, bool last);

// The cost of a step of `ranks` ranks. Communication overlaps with half of its micro-step's computation, and at most
// all but kH200Rates.shown of it does; the total has exchanges without overlap. Larger micro-batches have fewer
// micro-steps per token, and so less overhead and, with dist.zero 2 and 3, less communication. Never falls when more is
// recomputed. exchanged: bytes of a micro-step's exchanges (most_bytes() in planned_exchanges.h).
StepCost step_cost(const Config&, int64_t ranks, const DocumentMix& = {}, int64_t exchanged = 0);

}  // namespace triad
