// MicroStepGraphs: a micro-step recorded as CUDA graphs. A step's first micro-step, which overwrites gradients, later
// ones, which add to them, and the last one of several ranks, whose gradients are summed, differ; and each of them in
// dense steps (train.stages).
#pragma once
#include <array>
#include <utility>

#include "engine/graph.h"

namespace triad {

class MicroStepGraphs {
 public:
  explicit MicroStepGraphs(Device device)
      : recordings_{Recording(device), Recording(device), Recording(device),
                    Recording(device), Recording(device), Recording(device)} {}

  struct Recording {
    explicit Recording(Device device) : graph(device) {}
    // Whether the micro-step ran before without a graph, which loads its kernels. True from the second call on.
    bool ran_before() { return std::exchange(ran_, true); }
    Graph graph;

   private:
    bool ran_ = false;
  };
  Recording& recording(bool dense, bool first, bool summed) {
    return recordings_[(dense ? 3 : 0) + (summed ? 2 : first ? 0 : 1)];
  }
  void clear() {
    for (Recording& r : recordings_) r.graph.clear();
  }

 private:
  std::array<Recording, 6> recordings_;
};

}  // namespace triad
