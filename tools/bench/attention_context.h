// `triad bench attention --context N`: a layer's attention, forward and backward, on sequences that N ranks share.
#pragma once
#include <array>
#include <string>

#include "engine/comm/comm.h"
#include "io/json_config.h"
#include "tools/bench/attention_run.h"
#include "tools/bench/measure.h"

namespace triad {

struct SharedAttention {
  // A row for forward and one for backward, without their case: the slowest rank's time, and the ideal, rank 0's time
  // alone for whole sequences divided by the rank count. Backward's row has both passes' exchanges.
  Json rows = Json::array();
  double shared_gb = 0;       // memory that each rank needs, 10^9 bytes
  std::string skipped = "";   // why nothing was measured
  std::string no_ideal = "";  // why the ideal is missing
};

class SharedAttentionBench {
 public:
  // Measures the links. Collective.
  SharedAttentionBench(Comm&, Device, DType);

  // Times the problem on all ranks; then, on rank 0, whole sequences. drift: for random_qkv(). Collective.
  SharedAttention operator()(const AttentionProblem&, double drift);
  void print(const std::string& name, const SharedAttention&) const;

 private:
  using Times = std::array<Timing, 2>;  // forward, backward

  double longest(double us) const;
  Times time_shared(SharedAttention& to, const AttentionProblem&, double drift, const AttentionMemory&);
  Times time_whole(const AttentionProblem&, double drift, const AttentionMemory&);

  Comm& comm_;
  Device device_;
  DType dtype_;
  Stopwatch together_, alone_;
  double links_;  // bytes/s, from measure_links()
};

}  // namespace triad
