#include "tests/support/handshake_peer.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <chrono>
#include <memory>
#include <stdexcept>

#include "engine/comm/link.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

namespace triad::test {

LaunchEnv rank_of(int rank, int world, int test, const std::string& secret) {
  LaunchEnv env{.launcher = "torchrun",
                .rank = rank,
                .world = world,
                .local_rank = rank,
                .local_world = world,
                .master_host = "127.0.0.1"};
  env.master_port = reserved_port(test);
  env.run_id = "tests";
  env.secret = secret;
  return env;
}

std::future<RankResult> start_rank(LaunchEnv env, int64_t number, double timeout_s) {
  return std::async(std::launch::async, [env = std::move(env), number, timeout_s] {
    RankResult result;
    try {
      const std::unique_ptr<Link> link = open_tcp_link(env, timeout_s);
      result.numbers.resize(static_cast<size_t>(env.world));
      link->all_gather(&number, result.numbers.data(), sizeof number);
      link->finish();
    } catch (const Error& e) { result.error = e.what(); }
    return result;
  });
}
void check_numbers(std::vector<std::future<RankResult>>& ranks, const std::vector<int64_t>& numbers) {
  for (std::future<RankResult>& rank : ranks) {
    const RankResult result = rank.get();
    INFO(result.error);
    CHECK(result.numbers == numbers);
  }
}

FileHandle try_connect(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, host.c_str(), &address.sin_addr);
  FileHandle socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return socket;
  return FileHandle(-1);
}
FileHandle connect_to(const std::string& host, int port) {
  for (int i = 0; i < 6000; ++i) {
    FileHandle socket = try_connect(host, port);
    if (socket.get() >= 0) return socket;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  throw std::runtime_error(fmt::format("no process listens at {}:{}", host, port));
}
std::optional<Reply> receive_reply(const FileHandle& socket) {
  ReplyFrame frame;
  if (recv(socket.get(), frame.data(), frame.size(), MSG_WAITALL) != static_cast<ssize_t>(frame.size()))
    return std::nullopt;
  return decode_reply(frame);
}

Hello hello_of(const LaunchEnv& env, int rank) {
  return {.port = env.master_port,
          .rank = rank,
          .world = env.world,
          .has_secret = !env.secret.empty(),
          .run_id = env.run_id,
          .nonce = fresh_nonce()};
}

std::optional<ReplyCode> handshake_as(const FileHandle& socket, const LaunchEnv& env, int rank,
                                      const std::string& secret) {
  const Hello hello = hello_of(env, rank);
  send_bytes(socket, encode(hello));
  const std::optional<Reply> prove = receive_reply(socket);
  if (!prove || prove->code != ReplyCode::prove) return prove ? std::optional(prove->code) : std::nullopt;
  send_bytes(socket, proof_of_rank(secret, hello, *prove));
  const std::optional<Reply> last = receive_reply(socket);
  return last ? std::optional(last->code) : std::nullopt;
}

Recorder::Recorder(int port) : port_(port), listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, kHost, &address.sin_addr);
  const int on = 1;
  setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  REQUIRE(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(listen(listener_.get(), 8) == 0);
  thread_ = std::thread([this] { run(); });
}
std::string Recorder::stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  return recorded_;
}

void Recorder::run() {
  pollfd ready{.fd = listener_.get(), .events = POLLIN, .revents = 0};
  while (!stop_)
    if (poll(&ready, 1, 10) > 0) relay(FileHandle(accept(listener_.get(), nullptr, nullptr)));
}

void Recorder::relay(const FileHandle& rank) {
  const FileHandle first = connect_to("127.0.0.1", port_);
  const int on = 1;
  for (const int fd : {rank.get(), first.get()}) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  recorded_.clear();
  for (char bytes[4096];;) {
    pollfd ends[] = {{.fd = rank.get(), .events = POLLIN, .revents = 0},
                     {.fd = first.get(), .events = POLLIN, .revents = 0}};
    poll(ends, 2, -1);
    for (const int i : {0, 1}) {
      if (ends[i].revents == 0) continue;
      const ssize_t n = recv(ends[i].fd, bytes, sizeof bytes, 0);
      if (n <= 0 || send(ends[1 - i].fd, bytes, static_cast<size_t>(n), MSG_NOSIGNAL) != n) return;
      if (i == 0) recorded_.append(bytes, static_cast<size_t>(n));
    }
  }
}

std::string address_of(const Socket& socket) {
  TcpAddress address;
  address.size = sizeof address.storage;
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address.storage), &address.size);
  return address.text();
}

}  // namespace triad::test
