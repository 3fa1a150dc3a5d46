// How a run's ranks are divided (dist.replicas): into replicas of the model's state, each with equally many adjacent
// ranks. What dist.zero divides is divided among a replica's ranks. A step's gradients are summed within each replica,
// and then these sums over the replicas, in order. So all replicas make the same update.
#pragma once
#include "engine/comm/comm.h"
#include "train/config/config.h"

namespace triad {

// Throws UsageError if dist.context or dist.replicas does not divide the ranks.
void check_ranks(const Config&, int64_t world);
// How many ranks a replica has; one rank alone is a replica for any dist.replicas. Throws UsageError if dist.replicas
// does not divide the ranks.
int64_t ranks_of_replica(const Config&, int64_t world);
// How many ranks divide the state among them; 1 if each has all, as with dist.zero 0.
int64_t shard_count(const Config&, int64_t world);
bool is_sharded(const Config&, int64_t world);
// Whether gradients are summed within replicas of several ranks first, and then over the replicas.
bool sums_in_two_hops(const Config&, int64_t world);

struct RankGroups {
  RankGroups(Comm& all, const Config&);

  Comm& all;
  Comm& replica;  // this rank's replica; all ranks if there is one replica, or if each rank is one
  // the ranks that have this rank's place in each replica, with a stream of their own; null if `replica` has all ranks
  Comm* replicas;
};

}  // namespace triad
