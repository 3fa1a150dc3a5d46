// Exchanges between ranks that share sequences (dist.context), counted by dry steps as a run counts them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "train/config/config.h"
#include "train/fit/cards.h"

namespace triad {

// One exchange kind in forward, or in backward with its recomputation.
struct PlannedExchange {
  std::string kind;  // such as "keys and values of sel"
  bool backward = false;
  int64_t layers = 0, calls = 0;  // layers that have this kind; exchanges in a micro-step
  struct Bytes {
    int64_t rank = 0, sent = 0, received = 0;
  };
  // For each rank in a group, in a micro-step. With more than eight ranks only for the first, the last, and one in the
  // middle: the first receives the most keys, the last sends the most, and the middle has the most whole sliding
  // windows.
  std::vector<Bytes> ranks;
  // The most that a rank sends or receives. Links carry both at a time.
  int64_t most_bytes() const;
};
// Exchanges in a group of dist.context ranks; none if it is 1. comm, most_documents: as in plan_memory().
std::vector<PlannedExchange> plan_exchanges(const Config&, const PlannedDevice&, Comm* comm,
                                            int64_t most_documents = 0);
// Each kind's most bytes, added up, for one micro-step's passes.
int64_t most_bytes(const std::vector<PlannedExchange>&);

}  // namespace triad
