// Link over TCP as a star: every rank has one connection to rank 0, which forwards bytes.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/comm/hmac.h"
#include "engine/comm/link.h"
#include "engine/comm/rendezvous.h"

namespace triad {

namespace {

// A group's call is a call on the whole star, which all groups make at the same time: each rank sends to its group's
// ranks and ignores what it receives from others. So it takes as long as a call with all ranks.
class TcpGroup final : public Link {
 public:
  TcpGroup(Link& star, int world, const std::vector<int>& ranks)
      : star_(star), world_(static_cast<size_t>(world)), ranks_(ranks) {}

  std::string name() const override { return star_.name(); }

  void all_gather(const void* mine, void* all, int64_t bytes) override {
    const size_t n = static_cast<size_t>(bytes), most = most_bytes(n);
    std::vector<std::byte> to(most), from(most * world_);
    if (n > 0) std::memcpy(to.data(), mine, n);
    star_.all_gather(to.data(), from.data(), static_cast<int64_t>(most));
    for (size_t i = 0; i < ranks_.size() && n > 0; ++i)
      std::memcpy(static_cast<std::byte*>(all) + i * n, from.data() + static_cast<size_t>(ranks_[i]) * most, n);
  }

  void all_to_all(const void* to, void* from, int64_t bytes) override {
    const size_t n = static_cast<size_t>(bytes), most = most_bytes(n);
    std::vector<std::byte> sent(most * world_), received(most * world_);
    for (size_t i = 0; i < ranks_.size() && n > 0; ++i)
      std::memcpy(sent.data() + static_cast<size_t>(ranks_[i]) * most, static_cast<const std::byte*>(to) + i * n, n);
    star_.all_to_all(sent.data(), received.data(), static_cast<int64_t>(most));
    for (size_t i = 0; i < ranks_.size() && n > 0; ++i)
      std::memcpy(static_cast<std::byte*>(from) + i * n, received.data() + static_cast<size_t>(ranks_[i]) * most, n);
  }

  std::unique_ptr<Link> group(const std::vector<int>&) override { fail("a group of ranks has no groups"); }
  void finish() override {}

 private:
  // The largest byte count among the groups in this call.
  size_t most_bytes(size_t own) {
    std::vector<size_t> all(world_);
    star_.all_gather(&own, all.data(), sizeof own);
    return *std::max_element(all.begin(), all.end());
  }

  Link& star_;
  size_t world_;
  std::vector<int> ranks_;
};

class TcpLink final : public Link {
 public:
  TcpLink(const LaunchEnv& env, double timeout_s) : rank_(env.rank), world_(env.world) {
    if (rank_ == 0)
      peers_ = gather_ranks(env, timeout_s);
    else
      peers_.push_back(join_rank_0(env, timeout_s));
    for (const Socket& peer : peers_)
      if (peer.open()) peer.set_run_options(timeout_s);
  }

  std::string name() const override { return "TCP"; }

  void all_gather(const void* mine, void* all, int64_t bytes) override {
    const auto n = static_cast<size_t>(bytes);
    const std::span whole(static_cast<std::byte*>(all), n * static_cast<size_t>(world_));
    if (rank_ != 0) {
      send_to(0, {static_cast<const std::byte*>(mine), n});
      return receive_from(0, whole);
    }
    if (mine != all) std::memcpy(all, mine, n);
    for (int r = 1; r < world_; ++r) receive_from(r, whole.subspan(static_cast<size_t>(r) * n, n));
    for (int r = 1; r < world_; ++r) send_to(r, whole);
  }

  // Serves one destination at a time: all other ranks send it their parts through rank 0, which buffers one small
  // piece. This cannot deadlock: a rank sends its parts for all earlier destinations before it receives, and rank 0
  // reads no later parts until that rank has received.
  void all_to_all(const void* to, void* from, int64_t bytes) override {
    const auto n = static_cast<size_t>(bytes);
    const auto to_part = [&](int r) {
      return std::span(static_cast<const std::byte*>(to) + static_cast<size_t>(r) * n, n);
    };
    const auto from_part = [&](int r) {
      return std::span(static_cast<std::byte*>(from) + static_cast<size_t>(r) * n, n);
    };
    if (n > 0) std::memcpy(from_part(rank_).data(), to_part(rank_).data(), n);
    for (int destination = 0; destination < world_; ++destination)
      for (int source = 0; source < world_; ++source) {
        if (source == destination) continue;
        if (rank_ == 0 && source != 0 && destination != 0)
          relay(source, destination, n);
        else if (rank_ == source)
          send_to(rank_ == 0 ? destination : 0, to_part(destination));
        else if (rank_ == destination)
          receive_from(rank_ == 0 ? source : 0, from_part(source));
      }
  }

  std::unique_ptr<Link> group(const std::vector<int>& ranks) override {
    return std::make_unique<TcpGroup>(*this, world_, ranks);
  }
  void finish() override { peers_.clear(); }

 private:
  void relay(int source, int destination, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      const std::span piece = std::span(piece_).first(std::min(piece_.size(), bytes - done));
      receive_from(source, piece);
      send_to(destination, piece);
      done += piece.size();
    }
  }

  void send_to(int to, std::span<const std::byte> bytes) const {
    if (!peers_[static_cast<size_t>(to)].send(bytes))
      fail("the connection to rank {} is lost: {} ({} bytes were to be sent)", to, std::strerror(errno), bytes.size());
  }
  void receive_from(int from, std::span<std::byte> bytes) const {
    if (!peers_[static_cast<size_t>(from)].receive(bytes))
      fail("the connection to rank {} is lost ({} bytes were expected)", from, bytes.size());
  }

  int rank_, world_;
  std::vector<Socket> peers_;               // rank 0: one per rank, [0] closed; others: [0] is rank 0
  std::array<std::byte, 1 << 16> piece_{};  // the bytes that rank 0 is forwarding
};

}  // namespace

std::unique_ptr<Link> open_tcp_link(const LaunchEnv& env, double timeout_s) {
  if (env.master_host.empty() || env.master_port == 0)
    fail_usage(
        "{} ranks without MPI meet at MASTER_ADDR:MASTER_PORT, which are \"{}\" and {}: set both (torchrun does), "
        "or start a build with MPI by mpirun or srun --mpi=pmix",
        env.world, env.master_host, env.master_port);
  if (!env.secret.empty() && !why_no_hmac().empty()) fail_usage("TRIAD_SECRET is set, but {}", why_no_hmac());
  return std::make_unique<TcpLink>(env, timeout_s);
}

}  // namespace triad
