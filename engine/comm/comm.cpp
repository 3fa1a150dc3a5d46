#include "engine/comm/comm.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include "engine/check.h"
#include "engine/process/parse.h"

namespace triad {

namespace {

constexpr int kPriority = 5;  // the collectives' stream: above all of a context's streams (engine/context.cpp)

// Identifies a host and pid name space; a pid is unique only within one.
std::string host_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  std::error_code unknown;
  return host_name() + " " + boot + " " + std::filesystem::read_symlink("/proc/self/ns/pid", unknown).string();
}

}  // namespace

Comm::Comm(const LaunchEnv& env, Device device, std::unique_ptr<Link> link, double timeout_s)
    : rank_(env.rank),
      world_(env.world),
      link_(std::move(link)),
      stream_(std::make_shared<Stream>(device, "comm", kPriority)) {
  if (world_ == 1) return;
  guard_ = std::make_shared<CommGuard>(rank_, timeout_s);
  gather_peers(env, device);
}

Comm::Comm(int world, Device device)
    : rank_(0), world_(world), stream_(std::make_shared<Stream>(device, "comm", kPriority)) {}

Comm::Comm(Comm& all, const std::vector<int>& ranks, std::unique_ptr<Link> link)
    : rank_(static_cast<int>(std::find(ranks.begin(), ranks.end(), all.rank_) - ranks.begin())),
      world_(static_cast<int>(ranks.size())),
      link_(std::move(link)),
      guard_(all.guard_),
      stream_(all.stream_),
      all_(&all) {
  for (const int rank : ranks)
    if (!all.peers_.empty()) peers_.push_back(all.peers_[static_cast<size_t>(rank)]);
}

Comm& Comm::group(int count, int stride, Queue queue) {
  TRIAD_CHECK(count > 0 && stride > 0 && world_ % (count * stride) == 0, "groups of {} ranks, {} apart, of {} ranks",
              count, stride, world_);
  if (count == world_) return *this;
  std::unique_ptr<Comm>& group = groups_[{count, stride, queue}];
  if (group == nullptr) {
    const int block = count * stride, first = rank_ / block * block + rank_ % stride;
    std::vector<int> ranks;
    for (int i = 0; i < count; ++i) ranks.push_back(first + i * stride);
    group = make_group(ranks);
    if (queue == Queue::own) group->stream_ = std::make_shared<Stream>(stream_->device(), "comm of a group", kPriority);
  }
  return *group;
}

std::unique_ptr<Comm> Comm::make_group(const std::vector<int>&) { fail("{} has no groups of ranks", name()); }

namespace {

// Throws if a host's ranks are not adjacent: groups of adjacent ranks, such as replicas, would then be on several
// hosts, and sums in the order of ranks would cross the network for every rank. identities: host_identity() by rank.
void check_adjacent(const std::vector<Peer>& peers, const std::vector<std::string>& identities) {
  std::map<std::string, size_t> last;  // host -> its last rank so far
  for (size_t r = 0; r < identities.size(); ++r) {
    const auto [seen, fresh] = last.emplace(identities[r], r);
    if (!fresh && seen->second + 1 != r)
      fail(
          "launch: ranks {} and {} are on host {}, and rank {} between them is on host {}: a host's ranks must be "
          "adjacent (mpirun --map-by slot, srun --distribution=block, torchrun's own order)",
          seen->second, r, peers[r].host, r - 1, peers[r - 1].host);
    seen->second = r;
  }
}

}  // namespace

// Gathers all ranks' peers. Throws if they contradict each other, as when two ranks share a GPU.
void Comm::gather_peers(const LaunchEnv& env, Device device) {
  const std::string identity = host_identity(), name = backend::info(device).name,
                    pci = device.is_cuda() ? backend::pci_address(device) : "";
  const std::vector<std::string> lines =
      all_gather_host_text(fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}\n", env.rank, env.world, env.local_rank, getpid(),
                                       host_name(), name, pci) +
                               identity,
                           "the ranks' names");
  std::vector<std::string> identities;
  std::vector<LocalPeer> local;
  std::map<std::string, int> gpus;         // GPU (host and PCI address) -> rank
  std::map<std::string, int> local_ranks;  // host and local rank -> rank
  for (int r = 0; r < world_; ++r) {
    std::vector<std::string> f;
    for (size_t at = 0, end; at <= lines[r].size(); at = end + 1) {
      end = std::min(lines[r].find('\n', at), lines[r].size());
      f.push_back(lines[r].substr(at, end - at));
    }
    TRIAD_CHECK(f.size() == 8, "rank {} introduces itself as \"{}\"", r, lines[r]);
    const std::optional<int> local_rank = parse_number<int>(f[2]), pid = parse_number<int>(f[3]);
    TRIAD_CHECK(local_rank && pid, "rank {} introduces itself as \"{}\"", r, lines[r]);
    if (parse_number<int>(f[0]) != r || parse_number<int>(f[1]) != world_)
      fail("launch: process {} of {} calls itself rank {} of {}", r, world_, f[0], f[1]);
    peers_.push_back({.rank = r,
                      .local_rank = *local_rank,
                      .pid = *pid,
                      .host = f[4],
                      .device = f[5],
                      .pci = f[6],
                      .here = f[7] == identity});
    identities.push_back(f[7]);
    if (f[7] == identity && r != rank_) local.push_back({r, peers_.back().pid});
    const auto [same, alone] = local_ranks.emplace(f[7] + " " + f[2], r);
    if (!alone)
      fail("launch: ranks {} and {} of host {} both have local rank {}: its launcher's variables contradict each other",
           same->second, r, f[4], f[2]);
    if (f[6].empty()) continue;
    const auto [other, fresh] = gpus.emplace(f[7].substr(0, f[7].rfind(' ')) + f[6], r);
    if (!fresh)
      fail("launch: ranks {} and {} are on one GPU ({} of host {}): one process a GPU is needed", other->second, r,
           f[6], f[4]);
  }
  check_adjacent(peers_, identities);
  guard_->watch(local);
  if (!has_several_hosts()) return;
  std::vector<std::string> names;
  for (int r = 0; r < world_; ++r) names.push_back(rank_name(r));
  guard_->set_name(names[static_cast<size_t>(rank_)]);
  link_->name_ranks(names);
}

bool Comm::has_several_hosts() const {
  return !std::ranges::all_of(peers_, [](const Peer& peer) { return peer.here; });
}

std::string Comm::rank_name(int rank) const {
  const std::string number = fmt::format("rank {}", rank);
  return has_several_hosts() ? fmt::format("{} (host {})", number, peers_[static_cast<size_t>(rank)].host) : number;
}

// on: the stream on which the collective ends; null: it is finished when call() returns.
template <class Call>
void Comm::guarded(const char* kind, const std::string& what, int64_t bytes, const Stream* on, Call&& call) {
  TRIAD_CHECK(!recording_, "{} of {}: a graph may hold exchanges alone", kind, what);
  const auto began = std::chrono::steady_clock::now();
  const std::string collective = guard_->begin(fmt::format("{} of {}", kind, what), bytes);
  try {
    call();
  } catch (const Error& e) { fail("{}; under way: {}", e.what(), collective); }
  if (on != nullptr) return guard_->end_on(*on);
  guard_->end();
  (all_ == nullptr ? waited_ms_ : all_->waited_ms_) +=
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
}

void Comm::all_reduce(Tensor x, const std::string& what, CommCtas ctas) {
  if (guard_) guarded("all_reduce", what, x.bytes(), stream_of_collectives(), [&] { do_all_reduce(x, ctas); });
}
void Comm::reduce_scatter(Tensor x, const std::string& what, CommCtas ctas) {
  TRIAD_CHECK(x.numel() % world_ == 0, "reduce_scatter of {} over {} ranks: {}", what, world_, x.str());
  if (guard_) guarded("reduce_scatter", what, x.bytes(), stream_of_collectives(), [&] { do_reduce_scatter(x, ctas); });
}
void Comm::all_gather(Tensor x, const std::string& what) {
  TRIAD_CHECK(x.numel() % world_ == 0, "all_gather of {} over {} ranks: {}", what, world_, x.str());
  if (guard_) guarded("all_gather", what, x.bytes(), stream_of_collectives(), [&] { do_all_gather(x); });
}

void Comm::all_to_all(Tensor x, Tensor staging, const std::string& what) {
  TRIAD_CHECK(x.numel() % world_ == 0 && staging.numel() == x.numel() && staging.dtype == x.dtype,
              "all_to_all of {} over {} ranks: {}, staging {}", what, world_, x.str(), staging.str());
  if (guard_) guarded("all_to_all", what, x.bytes(), stream_of_collectives(), [&] { do_all_to_all(x, staging); });
}

void Comm::exchange(std::span<const ConstPiece> to, std::span<const Piece> from, int64_t most_bytes,
                    const std::string& what) {
  int64_t bytes = 0;
  const auto check = [&](const auto& pieces) {
    std::vector<int64_t> rank_bytes(static_cast<size_t>(world_));
    for (const auto& p : pieces) {
      const bool sound = p.rank >= 0 && p.rank < world_ && p.rank != rank_ && p.data.contiguous();
      TRIAD_CHECK(sound && (rank_bytes[static_cast<size_t>(p.rank)] += p.data.bytes()) <= most_bytes,
                  "exchange of {}: {} between ranks {} and {} of {}, at most {} bytes together", what, p.data.str(),
                  rank_, p.rank, world_, most_bytes);
      bytes += p.data.bytes();
    }
  };
  check(to), check(from);
  if (recording_) {
    try {
      return do_exchange(to, from, most_bytes);
    } catch (const Error& e) { fail("{}; while the exchange of {} is recorded", e.what(), what); }
  }
  if (guard_) guarded("exchange", what, bytes, stream_of_collectives(), [&] { do_exchange(to, from, most_bytes); });
}

void Comm::record(const std::function<void()>& work) {
  TRIAD_CHECK(can_record(), "{} cannot be recorded in a graph", name());
  recording_ = true;
  try {
    work();
  } catch (...) {
    recording_ = false;
    throw;
  }
  recording_ = false;
}

void Comm::launch_recorded(const std::string& what, const Stream& on, const std::function<void()>& launch) {
  if (guard_) guarded("exchanges", what, 0, &on, launch);
}

void Comm::all_gather_host_bytes(const void* mine, void* all, int64_t bytes, const std::string& what) {
  if (guard_) guarded("all_gather_host", what, bytes, nullptr, [&] { link_->all_gather(mine, all, bytes); });
}

std::vector<std::string> Comm::all_gather_host_text(const std::string& mine, const std::string& what) {
  const std::vector<int64_t> sizes = all_gather_host(static_cast<int64_t>(mine.size()), what);
  constexpr int64_t kMostBytes = int64_t{1} << 26;  // longer than any text that ranks exchange, in bytes
  for (size_t r = 0; r < sizes.size(); ++r)
    TRIAD_CHECK(sizes[r] >= 0 && sizes[r] <= kMostBytes, "rank {} announces {} bytes of {}: at most {} are allowed", r,
                sizes[r], what, kMostBytes);
  const size_t most = static_cast<size_t>(*std::max_element(sizes.begin(), sizes.end()));
  std::string padded = mine, all(most * sizes.size(), '\0');
  padded.resize(most);
  if (!guard_) return std::vector(sizes.size(), mine);
  if (most > 0) all_gather_host_bytes(padded.data(), all.data(), static_cast<int64_t>(most), what);
  std::vector<std::string> texts;
  for (size_t r = 0; r < sizes.size(); ++r) texts.push_back(all.substr(r * most, static_cast<size_t>(sizes[r])));
  return texts;
}

void Comm::add(std::span<double> values, const std::string& what) {
  if (!guard_) return;
  std::vector<double> all(values.size() * static_cast<size_t>(world_));
  all_gather_host_bytes(values.data(), all.data(), static_cast<int64_t>(values.size_bytes()), what);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = 0;
    for (size_t r = 0; r < static_cast<size_t>(world_); ++r) values[i] += all[r * values.size() + i];
  }
}

void Comm::finish() {
  if (!guard_) return;
  stream_->synchronize();
  for (const auto& [ranks, group] : groups_) group->stream_->synchronize();
  expect_end();
  for (auto& [ranks, group] : groups_) group->do_finish();
  do_finish();
  guard_->begin("the end of " + link_->name(), 0);
  link_->finish();
  guard_->end();
}

void Comm::expect_end() {
  if (!guard_) return;
  barrier("the end");
  guard_->expect_end();
  barrier("the guards' end");  // a rank may exit once it has passed this barrier
}

void Comm::fail_together(const std::string& why, int exit_code, const std::function<void()>& last_work) {
  abandon(why, exit_code, [&] {
    last_work();
    try {
      barrier("the same error");  // a rank exits only when no other rank's guard watches it
    } catch (const Error&) {}     // a rank with a different error may have exited already
  });
}

void Comm::abandon(const std::string& why, int exit_code, const std::function<void()>& last_work) {
  if (guard_) guard_->expect_end();  // other ranks may exit from here on
  std::fflush(stdout);
  std::fputs(fmt::format("triad: {}{}\n", world_ > 1 ? rank_name(rank_) + ": " : "", why).c_str(), stderr);
  last_work();
  _exit(exit_code);
}

Device device_of(const LaunchEnv& env) {
  const int gpus = backend::cuda_device_count();
  // If one GPU is visible, this rank uses it; gather_peers() checks that no two ranks share a GPU.
  if (env.world == 1 || gpus == 1) return Device::cuda(0);
  if (env.local_rank >= gpus)
    fail("launch: rank {} of {} has local rank {}, but its host has {} GPUs: start at most one process a GPU", env.rank,
         env.world, env.local_rank, gpus);
  return Device::cuda(env.local_rank);
}

namespace {

// A rank without peers, whose collectives do nothing: in a run with one process, or a plan for several ranks.
class NullComm final : public Comm {
 public:
  NullComm(int world, Device device, bool planned) : Comm(world, device), planned_(planned) {}
  std::string name() const override { return planned_ ? "planned" : "none"; }
  // A plan is for NCCL on one host: the case that needs the most memory.
  bool may_share() const override { return planned_; }

 protected:
  std::unique_ptr<Comm> make_group(const std::vector<int>& ranks) override {
    return std::make_unique<NullComm>(static_cast<int>(ranks.size()), Device::cpu(), planned_);
  }
  void do_all_reduce(Tensor, CommCtas) override {}
  void do_reduce_scatter(Tensor, CommCtas) override {}
  void do_all_gather(Tensor) override {}
  void do_all_to_all(Tensor, Tensor) override {}
  void do_exchange(std::span<const ConstPiece>, std::span<const Piece>, int64_t) override {}
  void do_finish() override {}

 private:
  bool planned_;
};

// Opens the MPI link under a time limit: MPI's own start waits without limit for a missing rank.
std::unique_ptr<Link> open_mpi_link_within(const LaunchEnv& env, double timeout_s) {
  CommGuard guard(env.rank, timeout_s);
  guard.begin("the start of MPI", 0);
  std::unique_ptr<Link> link = open_mpi_link(env);
  guard.end();
  return link;
}

// Opens the link between processes: MPI if the launcher starts it and this build has it, else TCP.
std::unique_ptr<Link> open_link(const LaunchEnv& env, double timeout_s) {
  return env.speaks_mpi && why_no_mpi().empty() ? open_mpi_link_within(env, timeout_s) : open_tcp_link(env, timeout_s);
}

}  // namespace

std::unique_ptr<Comm> make_self_comm(Device device) { return std::make_unique<NullComm>(1, device, /*planned=*/false); }

std::unique_ptr<Comm> make_planned_comm(int world) {
  return std::make_unique<NullComm>(world, Device::cpu(), /*planned=*/true);
}

std::unique_ptr<Comm> open_comm(const LaunchEnv& env, Device device, CommBackend backend, double timeout_s) {
  if (env.world == 1) return make_self_comm(device);
  if (backend == CommBackend::nccl && !device.is_cuda())
    fail_usage("dist.backend is nccl, but the run is on the CPU: mpi is for that");
  if (backend == CommBackend::mpi) {
    if (!why_no_mpi().empty()) fail("dist.backend is mpi, but MPI cannot be used: {}", why_no_mpi());
    if (!env.speaks_mpi)
      fail_usage("dist.backend is mpi, but {} starts no MPI: start with mpirun, or srun --mpi=pmix", env.launcher);
    return make_host_comm(env, device, open_mpi_link_within(env, timeout_s), timeout_s);
  }
  if (!device.is_cuda()) return make_host_comm(env, device, open_link(env, timeout_s), timeout_s);
  if (!why_no_nccl().empty())
    fail("{} ranks on GPUs need NCCL (or dist.backend mpi), which cannot be used: {}", env.world, why_no_nccl());
  return make_nccl_comm(env, device, open_link(env, timeout_s), timeout_s);
}

}  // namespace triad
