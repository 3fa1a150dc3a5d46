// Rank 0's side of the rendezvous. It polls all sockets and blocks on none, so an unknown peer cannot delay a rank.
#include "engine/comm/rendezvous.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

#include "engine/check.h"
#include "engine/comm/handshake.h"

namespace triad {

namespace {

using Clock = TcpClock;

// Counts dropped connections by reason, and logs only the first few, so that a flood of connections cannot fill the
// log.
class Dropped {
 public:
  void add(const LaunchEnv& env, const std::string& from, const std::string& why) {
    constexpr int kLoggedAlone = 5;
    ++counts_[why];
    if (++count_ <= kLoggedAlone) log_line(env, fmt::format("dropped the connection from {}: {}", from, why));
    if (count_ == kLoggedAlone) log_line(env, "further dropped connections are counted, not logged");
    more_than_logged_ = more_than_logged_ || count_ > kLoggedAlone;
  }
  bool more_than_logged() const { return more_than_logged_; }
  // A summary: "3 connections were dropped, 2 of them: ..."; empty if there were none.
  std::string text() const {
    if (count_ == 0) return "";
    std::string text = fmt::format("{} connections were dropped", count_);
    for (const auto& [why, count] : counts_) text += fmt::format(", {} of them: {}", count, why);
    return text;
  }

 private:
  std::map<std::string, int64_t> counts_;
  int64_t count_ = 0;
  bool more_than_logged_ = false;
};

class RankGatherer {
 public:
  RankGatherer(const LaunchEnv& env, double timeout_s)
      : env_(env),
        timeout_s_(timeout_s),
        end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s))),
        listeners_(listen_for_ranks(env)),
        ranks_(static_cast<size_t>(env.world)) {}

  std::vector<Socket> gather() {
    while (!all_connected()) {
      if (Clock::now() >= end_) fail_for_missing();
      wait();
      for (Pending& pending : pending_) read(pending);
      for (Pending& pending : pending_)  // follows read(), since bytes may have arrived while this process was stopped
        if (pending.socket.open() && Clock::now() >= pending.end)
          drop(pending, "it did not complete the handshake in time");
      erase_closed();
      for (const Socket& listener : listeners_) accept_from(listener);
    }
    listeners_.clear();
    pending_.clear();
    if (dropped_.more_than_logged()) log_line(env_, "while the ranks connected, " + dropped_.text());
    const ReplyFrame begin = encode(Reply{.code = ReplyCode::begin, .world = env_.world});
    for (size_t r = 1; r < ranks_.size(); ++r)
      if (!ranks_[r].send(begin)) fail("the connection to rank {} is lost before the run begins", r);
    return std::move(ranks_);
  }

 private:
  // A connection that has not yet passed the handshake.
  struct Pending {
    Socket socket;
    std::string from;
    Clock::time_point end;
    HelloFrame bytes{};  // received part of the expected frame
    size_t count = 0;    // received bytes
    bool said_hello = false;
    Hello hello{};
    Reply prove{};
  };

  // Also false if a rank that gave up or exited has closed its end; it may connect again.
  bool all_connected() {
    for (size_t r = 1; r < ranks_.size(); ++r)
      if (!is_connected(r)) return false;
    return true;
  }
  // A rank sends nothing until all have connected. A peer that sends is not a rank, so its socket is closed.
  bool is_connected(size_t rank) {
    std::byte one;
    if (ranks_[rank].open() && ranks_[rank].receive_now({&one, 1}) != 0) ranks_[rank] = Socket();
    return ranks_[rank].open();
  }

  [[noreturn]] void fail_for_missing() {
    std::string missing;
    int64_t count = 0;
    for (size_t r = 1; r < ranks_.size(); ++r) {
      if (is_connected(r)) continue;
      constexpr int64_t kMostNamed = 10;
      if (++count <= kMostNamed) missing += fmt::format("{}{}", count == 1 ? "" : ", ", r);
      if (count == kMostNamed + 1) missing += ", ...";
    }
    fail("{} of {} ranks did not come to {}:{} within dist.timeout_s = {} s: rank {}{}{}", count, env_.world,
         env_.master_host, env_.master_port, timeout_s_, missing, dropped_.text().empty() ? "" : "; ", dropped_.text());
  }

  void wait() const {
    std::vector<pollfd> sockets;
    const auto add = [&](const Socket& s) { sockets.push_back({.fd = s.fd(), .events = POLLIN, .revents = 0}); };
    for (const Socket& s : listeners_) add(s);
    for (const Pending& p : pending_) add(p.socket);
    constexpr int kPollMs = 100;
    poll(sockets.data(), sockets.size(), kPollMs);
  }

  void accept_from(const Socket& listener) {
    constexpr int kMostAtOnce = 16;  // less than kMostPending, so that each connection is read before it can be the
                                     // oldest
    for (int i = 0; i < kMostAtOnce; ++i) {
      TcpAddress from;
      from.size = sizeof from.storage;
      Socket socket(accept4(listener.fd(), reinterpret_cast<sockaddr*>(&from.storage), &from.size, SOCK_CLOEXEC));
      if (!socket.open()) {
        if (!recover_from(errno)) return;
        continue;
      }
      constexpr size_t kMostPending = 128;
      if (pending_.size() >= kMostPending + ranks_.size()) drop_oldest();
      constexpr auto kPatience = std::chrono::seconds(10);
      pending_.push_back({.socket = std::move(socket), .from = from.text(), .end = Clock::now() + kPatience});
      read(pending_.back());
      erase_closed();
    }
  }

  // Handles an accept(2) error by freeing a descriptor or pausing. Returns whether accept may be called again
  // immediately.
  bool recover_from(int error) {
    if (error == EAGAIN) return false;
    if (error == EINTR || error == ECONNABORTED) return true;
    const bool no_descriptors = error == EMFILE || error == ENFILE;
    if (no_descriptors && !pending_.empty()) {
      drop_oldest();
      return true;
    }
    if (error == EMFILE)
      fail("rank 0 has no descriptor left for another of {} ranks: raise its limit (ulimit -n)", env_.world);
    constexpr auto kPause = std::chrono::milliseconds(10);
    std::this_thread::sleep_for(kPause);
    return false;
  }

  // Drops the oldest connection, preferably one without a hello, because a rank sends its hello as soon as it has
  // connected.
  void drop_oldest() {
    const auto silent =
        std::find_if(pending_.begin(), pending_.end(), [](const Pending& pending) { return !pending.said_hello; });
    drop(silent != pending_.end() ? *silent : pending_.front(), "too many later connections");
    erase_closed();
  }

  void drop(Pending& pending, const std::string& why) {
    dropped_.add(env_, pending.from, why);
    pending.socket = Socket();
  }
  void erase_closed() {
    std::erase_if(pending_, [](const Pending& pending) { return !pending.socket.open(); });
  }

  void read(Pending& pending) {
    while (pending.socket.open()) {
      const size_t size = pending.said_hello ? sizeof(Mac) : kHelloBytes;
      const int n = pending.socket.receive_now(std::span(pending.bytes).subspan(pending.count, size - pending.count));
      if (n == 0) return;
      if (n < 0) return drop(pending, "it closed before the handshake was complete");
      pending.count += static_cast<size_t>(n);
      const std::span<const std::byte> received = std::span(pending.bytes).first(pending.count);
      if (!pending.said_hello && !may_be_hello(received))
        return drop(pending, "its first bytes are not those of a rank");
      if (pending.count < size) continue;
      pending.count = 0;
      pending.said_hello ? check_proof(pending, received) : check_hello(pending, received);
    }
  }

  void check_hello(Pending& pending, std::span<const std::byte> frame) {
    const std::optional<Hello> hello = decode_hello(frame);
    if (!hello) return drop(pending, "its hello is malformed");
    pending.hello = *hello;
    if (hello->port != env_.master_port || hello->run_id != env_.run_id) return refuse(pending, ReplyCode::other_run);
    if (hello->has_secret != !env_.secret.empty())
      return refuse(pending, hello->has_secret ? ReplyCode::has_no_secret : ReplyCode::needs_secret);
    pending.said_hello = true;
    pending.prove = {.code = ReplyCode::prove, .world = env_.world, .payload = fresh_nonce()};
    if (!pending.socket.send_now(encode(pending.prove))) drop(pending, "it closed before the handshake was complete");
  }

  void check_proof(Pending& pending, std::span<const std::byte> frame) {
    Mac given;
    std::copy(frame.begin(), frame.end(), given.begin());
    if (!env_.secret.empty() && !same_mac(given, proof_of_rank(env_.secret, pending.hello, pending.prove)))
      return refuse(pending, ReplyCode::wrong_secret);
    if (pending.hello.world != env_.world) return refuse(pending, ReplyCode::other_world);
    const auto rank = static_cast<size_t>(pending.hello.rank);
    if (is_connected(rank)) return refuse(pending, ReplyCode::taken);
    if (!answer(pending, ReplyCode::welcome)) return drop(pending, "it closed before the handshake was complete");
    ranks_[rank] = std::move(pending.socket);
  }

  void refuse(Pending& pending, ReplyCode why) {
    answer(pending, why);
    drop(pending, text_of(why));
  }

  // Rank 0 sends its own proof only after a rank's valid proof; otherwise any peer could test its guesses on it.
  bool answer(const Pending& pending, ReplyCode code) const {
    const bool is_proved = pending.said_hello && code != ReplyCode::wrong_secret;
    Reply reply{.code = code, .world = env_.world};
    if (is_proved) reply.payload = proof_of_rank_0(env_.secret, pending.hello, pending.prove, code);
    return pending.socket.send_now(encode(reply));
  }

  const LaunchEnv& env_;
  const double timeout_s_;
  const Clock::time_point end_;
  std::vector<Socket> listeners_, ranks_;
  std::vector<Pending> pending_;  // the order is that of acceptance
  Dropped dropped_;
};

}  // namespace

void log_line(const LaunchEnv& env, const std::string& text) {
  std::fputs(fmt::format("triad: rank {}: {}\n", env.rank, text).c_str(), stderr);
}

std::vector<Socket> gather_ranks(const LaunchEnv& env, double timeout_s) {
  if (env.run_id.empty() && env.secret.empty())
    log_line(env, fmt::format(
                      "warning: no run id (torchrun's, Slurm's) and no TRIAD_SECRET keep others out: any process that "
                      "connects to {}:{} may be taken for a rank",
                      env.master_host, env.master_port));
  return RankGatherer(env, timeout_s).gather();
}

}  // namespace triad
