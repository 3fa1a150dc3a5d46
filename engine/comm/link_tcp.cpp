// Link over TCP as a star: every rank has one connection to rank 0, which forwards bytes.
#include <algorithm>
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

  // One piece of every part at a time. Each rank sends its pieces for all others in one message, and rank 0 answers
  // with one message, so a call of 64 ranks takes 126 messages, not 64 x 63. This cannot deadlock: all ranks send
  // before they receive, and rank 0 receives from all before it sends.
  void all_to_all(const void* to, void* from, int64_t bytes) override {
    const auto n = static_cast<size_t>(bytes), world = static_cast<size_t>(world_), own = static_cast<size_t>(rank_);
    const size_t most = std::max(kForwardedBytes / (world * world), kLeastPiece);
    const auto* const to_bytes = static_cast<const std::byte*>(to);
    auto* const from_bytes = static_cast<std::byte*>(from);
    if (n > 0) std::memcpy(from_bytes + own * n, to_bytes + own * n, n);
    for (size_t begin = 0; begin < n; begin += most) {
      const size_t piece = std::min(most, n - begin);
      const auto to_piece = [&](size_t rank) { return std::span(to_bytes + rank * n + begin, piece); };
      const auto from_piece = [&](size_t rank) { return std::span(from_bytes + rank * n + begin, piece); };
      if (rank_ == 0)
        forward(piece, to_piece, from_piece);
      else
        exchange(piece, to_piece, from_piece);
    }
  }

  std::unique_ptr<Link> group(const std::vector<int>& ranks) override {
    return std::make_unique<TcpGroup>(*this, world_, ranks);
  }
  void name_ranks(const std::vector<std::string>& names) override { names_ = names; }
  void finish() override { peers_.clear(); }

 private:
  // Messages hold a piece for or from each rank, ascending, except the rank that sends or receives them.
  template <class To, class From>
  void exchange(size_t piece, const To& to_piece, const From& from_piece) {
    const auto world = static_cast<size_t>(world_), own = static_cast<size_t>(rank_);
    message_.resize((world - 1) * piece);
    const auto at = [&](size_t rank) { return message_.data() + (rank < own ? rank : rank - 1) * piece; };
    for (size_t rank = 0; rank < world; ++rank)
      if (rank != own) std::memcpy(at(rank), to_piece(rank).data(), piece);
    send_to(0, message_);
    receive_from(0, message_);
    for (size_t rank = 0; rank < world; ++rank)
      if (rank != own) std::memcpy(from_piece(rank).data(), at(rank), piece);
  }

  // Rank 0's part in the same.
  template <class To, class From>
  void forward(size_t piece, const To& to_piece, const From& from_piece) {
    const auto world = static_cast<size_t>(world_);
    message_.resize((world - 1) * piece);
    answers_.resize(world * message_.size());
    const auto answer = [&](size_t to, size_t from) {
      return answers_.data() + to * message_.size() + (from < to ? from : from - 1) * piece;
    };
    for (size_t source = 1; source < world; ++source) {
      receive_from(static_cast<int>(source), message_);
      std::memcpy(from_piece(source).data(), message_.data(), piece);
      std::memcpy(answer(source, 0), to_piece(source).data(), piece);
      for (size_t to = 1; to < world; ++to)
        if (to != source) std::memcpy(answer(to, source), message_.data() + (to < source ? to : to - 1) * piece, piece);
    }
    for (size_t to = 1; to < world; ++to)
      send_to(static_cast<int>(to), std::span(answers_).subspan(to * message_.size(), message_.size()));
  }

  void send_to(int to, std::span<const std::byte> bytes) const {
    if (!peers_[static_cast<size_t>(to)].send(bytes))
      fail("the connection to {} is lost: {} ({} bytes were to be sent)", rank_name(to), std::strerror(errno),
           bytes.size());
  }
  void receive_from(int from, std::span<std::byte> bytes) const {
    if (!peers_[static_cast<size_t>(from)].receive(bytes))
      fail("the connection to {} is lost ({} bytes were expected)", rank_name(from), bytes.size());
  }
  std::string rank_name(int rank) const {
    return names_.empty() ? fmt::format("rank {}", rank) : names_[static_cast<size_t>(rank)];
  }

  // Bytes that rank 0 forwards at a time, and the least bytes of a rank's piece among them.
  static constexpr size_t kForwardedBytes = size_t{1} << 22, kLeastPiece = 64;

  int rank_, world_;
  std::vector<Socket> peers_;  // rank 0: one per rank, [0] closed; others: [0] is rank 0
  std::vector<std::byte> message_, answers_;
  std::vector<std::string> names_;
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
