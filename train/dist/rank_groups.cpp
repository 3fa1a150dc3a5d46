#include "train/dist/rank_groups.h"

#include "engine/check.h"

namespace triad {

void check_ranks(const Config& config, int64_t world) {
  if (world % config.dist.context != 0)
    fail_usage("dist.context is {}: it must divide the number of ranks, which is {}", config.dist.context, world);
  ranks_of_replica(config, world);
}

int64_t ranks_of_replica(const Config& config, int64_t world) {
  const int64_t replicas = world == 1 ? 1 : config.dist.replicas;
  if (world % replicas != 0)
    fail_usage("dist.replicas is {}, but the run has {} ranks: each replica needs as many as the others", replicas,
               world);
  return world / replicas;
}

int64_t shard_count(const Config& config, int64_t world) {
  return config.dist.zero > 0 ? ranks_of_replica(config, world) : 1;
}

bool is_sharded(const Config& config, int64_t world) { return shard_count(config, world) > 1; }

bool sums_in_two_hops(const Config& config, int64_t world) {
  const int64_t ranks = ranks_of_replica(config, world);
  return ranks > 1 && ranks < world;
}

namespace {
int ranks_to_sum_first(const Config& config, int world) {
  const auto ranks = static_cast<int>(ranks_of_replica(config, world));
  return ranks == 1 ? world : ranks;
}
}  // namespace

RankGroups::RankGroups(Comm& comm, const Config& config)
    : all(comm),
      replica(comm.group(ranks_to_sum_first(config, comm.world()))),
      replicas(sums_in_two_hops(config, comm.world())
                   ? &comm.group(comm.world() / replica.world(), /*stride=*/replica.world(), Comm::Queue::own)
                   : nullptr) {}

}  // namespace triad
