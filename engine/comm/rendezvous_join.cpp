// The rendezvous for ranks other than 0: they try rank 0 at each port in turn.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <thread>

#include "engine/check.h"
#include "engine/comm/handshake.h"
#include "engine/comm/rendezvous.h"

namespace triad {

namespace {

using Clock = TcpClock;
using Seconds = std::chrono::duration<double>;

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
}

class Joiner {
 public:
  Joiner(const LaunchEnv& env, double timeout_s) : env_(env), timeout_s_(timeout_s), end_(after(timeout_s)) {}

  Socket join() {
    constexpr double kFirstPatienceS = 1, kMostPatienceS = 10;
    constexpr auto kPause = std::chrono::milliseconds(50), kMostPause = std::chrono::milliseconds(500);
    double patience_s = kFirstPatienceS;  // reply time limit, because a program that never replies may use the port
    for (auto pause = kPause; Clock::now() < end_; pause = std::min(2 * pause, kMostPause)) {
      std::vector<TcpAddress> addresses = resolve_tcp(env_.master_host, &no_reply_);
      const Ports ports = ports_of(env_);
      for (int port = ports.begin; port < ports.end; ++port)
        for (TcpAddress& address : addresses) {
          address.set_port(port);
          if (Clock::now() >= end_) break;  // many ports may each take their time
          Socket socket = connect_tcp(address, std::min(after(patience_s), end_), &no_reply_);
          if (socket.open() && handshake(socket, address.text(), patience_s) && wait_for_all(socket)) return socket;
        }
      std::this_thread::sleep_for(pause);
      patience_s = std::min(2 * patience_s, kMostPatienceS);
    }
    fail(
        "rank {} found no rank 0 of {} ranks at {}:{} nor at the ports that follow within dist.timeout_s = {} s; the "
        "last attempt: {}{}",
        env_.rank, env_.world, env_.master_host, env_.master_port, timeout_s_, no_reply_,
        refusal_.empty() ? "" : "; " + refusal_);
  }

 private:
  // Performs the handshake; true if rank 0 of this run accepts this rank.
  bool handshake(const Socket& socket, const std::string& at, double patience_s) {
    const Hello hello{.port = env_.master_port,
                      .rank = env_.rank,
                      .world = env_.world,
                      .has_secret = !env_.secret.empty(),
                      .run_id = env_.run_id,
                      .nonce = fresh_nonce()};
    const std::optional<Reply> prove = request(socket, encode(hello), patience_s);
    if (!prove || (prove->code == ReplyCode::welcome || prove->code == ReplyCode::begin)) return no_reply(at);
    if (prove->code != ReplyCode::prove) return refused(at, *prove, false);
    const std::optional<Reply> last = request(socket, proof_of_rank(env_.secret, hello, *prove), patience_s);
    if (!last || last->code == ReplyCode::prove || last->code == ReplyCode::begin) return no_reply(at);
    const bool is_proved =
        env_.secret.empty() || same_mac(last->payload, proof_of_rank_0(env_.secret, hello, *prove, last->code));
    if (last->code != ReplyCode::welcome) return refused(at, *last, is_proved);
    if (!is_proved) refusal_ = fmt::format("the program that replies at {} does not have TRIAD_SECRET", at);
    return is_proved;
  }

  std::optional<Reply> request(const Socket& socket, std::span<const std::byte> frame, double patience_s) {
    ReplyFrame bytes;
    if (!socket.send_now(frame)) return std::nullopt;
    if (socket.receive_until(bytes, after(patience_s)) != Socket::Received::all) return std::nullopt;
    return decode_reply(bytes);
  }

  bool no_reply(const std::string& at) {
    no_reply_ = fmt::format("the program that listens at {} does not reply as rank 0", at);
    return false;
  }

  // Logs a refusal immediately, because the timeout may be long. Does not log that another run uses this port, because
  // that is not an error.
  bool refused(const std::string& at, const Reply& reply, bool is_proved) {
    const std::string why =
        fmt::format("rank 0 at {} refuses rank {} of {}: {}", at, env_.rank, env_.world, text_of(reply.code));
    if (reply.code == ReplyCode::other_world && is_proved && !env_.run_id.empty())
      fail("launch: rank 0 at {} of run {} counts {} ranks, and this is rank {} of {}: WORLD_SIZE has to be the same",
           at, env_.run_id, reply.world, env_.rank, env_.world);
    if (reply.code == ReplyCode::other_run) return other_run(why);
    if (logged_.insert(reply.code).second) log_line(env_, why + "; this rank retries until dist.timeout_s");
    refusal_ = why;
    return false;
  }
  bool other_run(const std::string& why) {
    if (refusal_.empty()) no_reply_ = why;
    return false;
  }

  // Waits for ReplyCode::begin. False if rank 0 closes the connection before; this rank then tries again.
  bool wait_for_all(const Socket& socket) {
    ReplyFrame bytes;
    const Socket::Received received = socket.receive_until(bytes, end_);
    const std::optional<Reply> begin = decode_reply(bytes);
    if (received == Socket::Received::all && begin && begin->code == ReplyCode::begin) return true;
    refusal_ = received == Socket::Received::late
                   ? "rank 0 accepted this rank, but not all ranks connected"
                   : "rank 0 accepted this rank, and closed the connection before all ranks had connected";
    return false;
  }

  const LaunchEnv& env_;
  const double timeout_s_;
  const Clock::time_point end_;
  std::string no_reply_, refusal_;  // why rank 0 was not reached or refused, for the error message
  std::set<ReplyCode> logged_;
};

}  // namespace

Socket join_rank_0(const LaunchEnv& env, double timeout_s) { return Joiner(env, timeout_s).join(); }

}  // namespace triad
