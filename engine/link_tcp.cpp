// A star: every rank holds one connection to rank 0, which passes bytes on.
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/link.h"

namespace triad {

namespace {

using Clock = std::chrono::steady_clock;

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }

  // False if the other end is gone (or, for receive, silent for the socket's time limit where it has one).
  bool send(std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      bytes = bytes.subspan(static_cast<size_t>(n));
    }
    return true;
  }
  bool receive(std::span<std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = ::recv(fd_, bytes.data(), bytes.size(), 0);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      bytes = bytes.subspan(static_cast<size_t>(n));
    }
    return true;
  }
  // 0: none. Of sending, connect(2) is part.
  void limit_receive(int seconds) const { limit(SO_RCVTIMEO, seconds); }
  void limit_send(int seconds) const { limit(SO_SNDTIMEO, seconds); }
  // For the run: small messages go at once; and hours without one are no reason for what lies between two hosts to
  // forget the connection, nor is a host that is gone taken for a silent one.
  void prepare(double timeout_s) const {
    constexpr int kIdleS = 30, kProbeS = 10, kMostProbes = 127;
    set(IPPROTO_TCP, TCP_NODELAY, 1);
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, kIdleS);
    set(IPPROTO_TCP, TCP_KEEPINTVL, kProbeS);
    set(IPPROTO_TCP, TCP_KEEPCNT, static_cast<int>(std::clamp(timeout_s / kProbeS, 1.0, double{kMostProbes})));
  }

 private:
  void set(int level, int option, int value) const { setsockopt(fd_, level, option, &value, sizeof value); }
  void limit(int option, int seconds) const {
    const timeval limit{.tv_sec = seconds, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, option, &limit, sizeof limit);
  }

  int fd_;
};

// What the two ends say first, so that nobody takes another program, or another run's process, for its own: a rank its
// hello, rank 0 its own, the rank once more. Without the third word rank 0 would count one that has given up waiting.
struct Hello {
  char magic[8] = {'t', 'r', 'i', 'a', 'd', 'l', 'n', 'k'};
  int32_t port = 0;  // MASTER_PORT: no other run's on this host
  int32_t rank = 0, world = 0;
};
std::span<std::byte> bytes_of(Hello& hello) { return std::as_writable_bytes(std::span(&hello, 1)); }
bool is_ours(const Hello& hello, const LaunchEnv& env) {
  if (std::memcmp(hello.magic, Hello{}.magic, sizeof hello.magic) != 0 || hello.port != env.master_port) return false;
  if (hello.world != env.world)
    fail("launch: rank {} at {}:{} is one of {} ranks, rank {} of {}", env.rank, env.master_host, env.master_port,
         env.world, hello.rank, hello.world);
  return true;
}

// torchrun's own store may sit at the port itself; another run's, or any program, at the next.
constexpr int kPorts = 16;
int first_port(const LaunchEnv& env) { return env.master_port + (env.port_taken ? 1 : 0); }
int ports_end(const LaunchEnv& env) { return std::min(first_port(env) + kPorts, 1 << 16); }

Socket listen_somewhere(const LaunchEnv& env) {
  for (int port = first_port(env); port < ports_end(env); ++port) {
    Socket socket(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const bool six = socket.open();
    if (!six) socket = Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket.open()) fail("no TCP socket: {}", std::strerror(errno));
    const int on = 1, off = 0;
    setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    int bound = -1;
    if (six) {
      setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);  // both families
      sockaddr_in6 any{};
      any.sin6_family = AF_INET6;
      any.sin6_addr = in6addr_any;
      any.sin6_port = htons(static_cast<uint16_t>(port));
      bound = bind(socket.fd(), reinterpret_cast<const sockaddr*>(&any), sizeof any);
    } else {
      sockaddr_in any{};
      any.sin_family = AF_INET;
      any.sin_port = htons(static_cast<uint16_t>(port));
      bound = bind(socket.fd(), reinterpret_cast<const sockaddr*>(&any), sizeof any);
    }
    if (bound == 0 && listen(socket.fd(), env.world) == 0) return socket;
  }
  fail("rank 0 cannot listen at MASTER_PORT {} nor at the {} ports that follow: {}", env.master_port, kPorts,
       std::strerror(errno));
}

// One attempt at one port; a closed socket if nobody of ours answers, and why.
Socket try_connect(const LaunchEnv& env, int port, std::string* why) {
  constexpr int kSeconds = 5;  // to connect, or for an answer
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = getaddrinfo(env.master_host.c_str(), std::to_string(port).c_str(), &hints, &found);
      error != 0) {
    *why = gai_strerror(error);
    return Socket();
  }
  Socket socket;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    Socket attempt(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    if (!attempt.open()) continue;
    attempt.limit_send(kSeconds);
    if (connect(attempt.fd(), a->ai_addr, a->ai_addrlen) != 0) {
      *why = errno == EINPROGRESS ? "no answer" : std::strerror(errno);  // in progress: beyond the limit
      continue;
    }
    socket = std::move(attempt);
    break;
  }
  freeaddrinfo(found);
  if (!socket.open()) return socket;
  socket.limit_receive(kSeconds);
  Hello hello, answer;
  hello.port = env.master_port, hello.rank = env.rank, hello.world = env.world;
  if (!socket.send(bytes_of(hello)) || !socket.receive(bytes_of(answer)) || !is_ours(answer, env) ||
      answer.rank != 0 ||  // its own words: a socket whose port came to be the one it looked for is connected to itself
      !socket.send(bytes_of(hello))) {
    *why = "whoever is there does not answer as rank 0 of this run";
    return Socket();
  }
  socket.limit_receive(0);
  socket.limit_send(0);
  return socket;
}

class TcpLink final : public Link {
 public:
  TcpLink(const LaunchEnv& env, double timeout_s) : rank_(env.rank), world_(env.world), peers_(env.world) {
    const auto end =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    if (rank_ == 0)
      accept_all(env, end);
    else
      connect_to_first(env, end);
    for (const Socket& peer : peers_)
      if (peer.open()) peer.prepare(timeout_s);
  }

  std::string name() const override { return "TCP"; }

  void all_gather(const void* mine, void* all, int64_t bytes) override {
    const auto n = static_cast<size_t>(bytes);
    const std::span whole(static_cast<std::byte*>(all), n * static_cast<size_t>(world_));
    if (rank_ != 0) {
      give(0, {static_cast<const std::byte*>(mine), n});
      return take(0, whole);
    }
    if (mine != all) std::memcpy(all, mine, n);
    for (int r = 1; r < world_; ++r) take(r, whole.subspan(static_cast<size_t>(r) * n, n));
    for (int r = 1; r < world_; ++r) give(r, whole);
  }

  void all_to_all(const void* to, void* from, int64_t bytes) override {
    const auto n = static_cast<size_t>(bytes), whole = n * static_cast<size_t>(world_);
    if (rank_ != 0) {
      give(0, {static_cast<const std::byte*>(to), whole});
      return take(0, {static_cast<std::byte*>(from), whole});
    }
    relay_.resize(whole * static_cast<size_t>(world_));
    std::memcpy(relay_.data(), to, whole);
    for (int r = 1; r < world_; ++r) take(r, std::span(relay_).subspan(static_cast<size_t>(r) * whole, whole));
    std::vector<std::byte> out(whole);
    for (int r = world_ - 1; r >= 0; --r) {
      for (size_t s = 0; s < static_cast<size_t>(world_); ++s)
        std::memcpy(out.data() + s * n, relay_.data() + s * whole + static_cast<size_t>(r) * n, n);
      if (r > 0)
        give(r, out);
      else
        std::memcpy(from, out.data(), whole);
    }
  }

  void finish() override { peers_.clear(); }

 private:
  void accept_all(const LaunchEnv& env, Clock::time_point end) {
    const Socket listener = listen_somewhere(env);
    for (int come = 1; come < world_;) {
      pollfd ready{.fd = listener.fd(), .events = POLLIN, .revents = 0};
      constexpr int kPollMs = 100;
      if (Clock::now() >= end)
        fail("only {} of {} ranks came to {}:{} within dist.timeout_s", come, world_, env.master_host, env.master_port);
      if (poll(&ready, 1, kPollMs) <= 0) continue;
      Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket.open()) continue;
      constexpr int kHelloSeconds = 2;
      socket.limit_receive(kHelloSeconds);
      Hello hello, answer;
      if (!socket.receive(bytes_of(hello)) || !is_ours(hello, env)) continue;
      if (hello.rank <= 0 || hello.rank >= world_) continue;
      answer.port = env.master_port, answer.world = world_;
      if (!socket.send(bytes_of(answer))) continue;
      // One that has given up has closed its end; one that is slow is waited for.
      constexpr double kThirdWordSeconds = 60;
      const double left = std::chrono::duration<double>(end - Clock::now()).count();
      socket.limit_receive(static_cast<int>(std::clamp(left, 1.0, kThirdWordSeconds)));
      if (!socket.receive(bytes_of(answer))) continue;
      if (peers_[static_cast<size_t>(hello.rank)].open())
        fail("two processes came to {}:{} as rank {} of {}", env.master_host, env.master_port, hello.rank, world_);
      socket.limit_receive(0);
      peers_[static_cast<size_t>(hello.rank)] = std::move(socket);
      ++come;
    }
  }

  void connect_to_first(const LaunchEnv& env, Clock::time_point end) {
    std::string why;
    while (Clock::now() < end) {
      for (int port = first_port(env); port < ports_end(env) && Clock::now() < end; ++port) {
        peers_[0] = try_connect(env, port, &why);
        if (peers_[0].open()) return;
      }
      constexpr auto kPause = std::chrono::milliseconds(50);
      std::this_thread::sleep_for(kPause);
    }
    fail(
        "rank {} found no rank 0 of {} ranks at {}:{} nor at the ports that follow within dist.timeout_s; the last "
        "attempt: {}",
        env.rank, env.world, env.master_host, env.master_port, why);
  }

  void give(int to, std::span<const std::byte> bytes) const {
    if (!peers_[static_cast<size_t>(to)].send(bytes))
      fail("the connection to rank {} is lost: {} ({} bytes were to be sent)", to, std::strerror(errno), bytes.size());
  }
  void take(int from, std::span<std::byte> bytes) const {
    if (!peers_[static_cast<size_t>(from)].receive(bytes))
      fail("the connection to rank {} is lost ({} bytes were expected)", from, bytes.size());
  }

  int rank_, world_;
  std::vector<Socket> peers_;  // rank 0: one for each other rank; others: [0] alone
  std::vector<std::byte> relay_;
};

}  // namespace

std::unique_ptr<Link> open_tcp_link(const LaunchEnv& env, double timeout_s) {
  if (env.master_host.empty() || env.master_port == 0)
    fail_usage(
        "{} ranks without MPI meet at MASTER_ADDR:MASTER_PORT, which are \"{}\" and {}: set both (torchrun does), "
        "or start a build with MPI by mpirun or srun --mpi=pmix",
        env.world, env.master_host, env.master_port);
  return std::make_unique<TcpLink>(env, timeout_s);
}

}  // namespace triad
