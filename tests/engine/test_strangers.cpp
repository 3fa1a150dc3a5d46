// Foreign connections to the TCP port at which the ranks of a run connect to rank 0: connections that are silent, send
// garbage, claim a rank, replay a recorded handshake, or announce more bytes than they send. Ranks are threads of this
// process, and processes where whole runs are compared. All connections use 127.0.0.0/8 and [::1].
#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/comm/handshake.h"
#include "engine/comm/launch_env.h"
#include "engine/comm/link.h"
#include "engine/comm/rendezvous.h"
#include "io/file.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// In seconds: longer than any rank needs, shorter than a rank 0 that waits for a stranger.
constexpr double kMeetS = 40;
// In seconds: how long a rank that will be refused retries.
constexpr double kRefusedS = 5;
constexpr const char* kSecret = "tests only: not a secret";

// The first of 20 ports for this test: rank 0 listens on one of 16, and tests that run concurrently must not collide.
int port_of(int test) {
  constexpr int kFirst = 10000, kRanges = 1000, kPorts = 20, kTests = 12;
  return kFirst + (getpid() * kTests + test) % kRanges * kPorts;
}

LaunchEnv rank_of(int rank, int world, int test, const std::string& secret = "") {
  LaunchEnv env{.launcher = "torchrun",
                .rank = rank,
                .world = world,
                .local_rank = rank,
                .local_world = world,
                .master_host = "127.0.0.1"};
  env.master_port = port_of(test);
  env.run_id = "strangers";
  env.secret = secret;
  return env;
}

// The outcome of a rank: the numbers gathered from all ranks, or the error.
struct Ended {
  std::vector<int64_t> numbers;
  std::string error;
};
std::future<Ended> start_rank(LaunchEnv env, int64_t number, double timeout_s = kMeetS) {
  return std::async(std::launch::async, [env = std::move(env), number, timeout_s] {
    Ended ended;
    try {
      const std::unique_ptr<Link> link = open_tcp_link(env, timeout_s);
      ended.numbers.resize(static_cast<size_t>(env.world));
      link->all_gather(&number, ended.numbers.data(), sizeof number);
      link->finish();
    } catch (const Error& e) { ended.error = e.what(); }
    return ended;
  });
}
void check_numbers(std::vector<std::future<Ended>>& ranks, const std::vector<int64_t>& numbers) {
  for (std::future<Ended>& rank : ranks) {
    const Ended ended = rank.get();
    INFO(ended.error);
    CHECK(ended.numbers == numbers);
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
// Connects, retrying until the port accepts.
FileHandle connect_to(const std::string& host, int port) {
  for (int i = 0; i < 6000; ++i) {
    FileHandle socket = try_connect(host, port);
    if (socket.get() >= 0) return socket;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  throw std::runtime_error("nobody listens");
}

template <class Bytes>
void say(const FileHandle& socket, const Bytes& bytes) {
  send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}
std::optional<Reply> hear(const FileHandle& socket) {
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

// Makes a whole handshake as the given rank with the given secret, and returns rank 0's last reply code.
std::optional<ReplyCode> claim(const FileHandle& socket, const LaunchEnv& env, int rank, const std::string& secret) {
  const Hello hello = hello_of(env, rank);
  say(socket, encode(hello));
  const std::optional<Reply> prove = hear(socket);
  if (!prove || prove->code != ReplyCode::prove) return prove ? std::optional(prove->code) : std::nullopt;
  say(socket, proof_of_rank(secret, hello, *prove));
  const std::optional<Reply> last = hear(socket);
  return last ? std::optional(last->code) : std::nullopt;
}

// A relay between a rank, whose MASTER_ADDR is 127.0.0.2, and rank 0 at 127.0.0.1. It records what the rank sends.
class Recorder {
 public:
  explicit Recorder(int port) : port_(port), listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
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
  ~Recorder() { stop(); }
  // Stops the relay and returns the bytes that the rank sent over the last connection.
  std::string stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return said_;
  }
  static constexpr const char* kHost = "127.0.0.2";

 private:
  void run() {
    pollfd ready{.fd = listener_.get(), .events = POLLIN, .revents = 0};
    while (!stop_)
      if (poll(&ready, 1, 10) > 0) pass_on(FileHandle(accept(listener_.get(), nullptr, nullptr)));
  }
  void pass_on(const FileHandle& rank) {
    const FileHandle first = connect_to("127.0.0.1", port_);
    const int on = 1;
    for (const int fd : {rank.get(), first.get()}) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    said_.clear();
    for (char bytes[4096];;) {
      pollfd ends[] = {{.fd = rank.get(), .events = POLLIN, .revents = 0},
                       {.fd = first.get(), .events = POLLIN, .revents = 0}};
      poll(ends, 2, -1);
      for (const int i : {0, 1}) {
        if (ends[i].revents == 0) continue;
        const ssize_t n = recv(ends[i].fd, bytes, sizeof bytes, 0);
        if (n <= 0 || send(ends[1 - i].fd, bytes, static_cast<size_t>(n), MSG_NOSIGNAL) != n) return;
        if (i == 0) said_.append(bytes, static_cast<size_t>(n));
      }
    }
  }

  int port_;
  FileHandle listener_;
  std::atomic<bool> stop_ = false;
  std::string said_;
  std::thread thread_;
};

// Runs f and returns what it wrote to stderr.
template <class F>
std::string stderr_of(F&& f) {
  const TemporaryFolder folder;
  const FileHandle before(dup(STDERR_FILENO)), log(open(folder.file("log").c_str(), O_WRONLY | O_CREAT, 0600));
  dup2(log.get(), STDERR_FILENO);
  f();
  dup2(before.get(), STDERR_FILENO);
  return read_text(folder.file("log"));
}

std::string address_of(const Socket& socket) {
  TcpAddress address;
  address.size = sizeof address.storage;
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address.storage), &address.size);
  return address.text();
}

}  // namespace

TEST_CASE("strangers: neither garbage nor silence ends or holds up a run that starts", "[dist][strangers]") {
  std::vector<std::future<Ended>> ranks;
  const LaunchEnv first = rank_of(0, 2, 0);
  ranks.push_back(start_rank(first, 5));
  const HelloFrame hello = encode(hello_of(first, 1));
  std::vector<FileHandle> strangers;
  const auto stranger = [&](std::span<const std::byte> bytes) {
    strangers.push_back(connect_to("127.0.0.1", first.master_port));
    say(strangers.back(), bytes);
  };
  // Strangers that send part of a valid hello, or all of it, and are then silent.
  for (const size_t size : {size_t{0}, size_t{1}, size_t{8}, hello.size() - 1, hello.size()})
    stranger(std::span(hello).first(size));
  // The hello of builds that had no run ids: magic, port, rank 1, world 3. Its different world size once ended the run.
  std::string old = "triadlnk";
  for (const int32_t word : {first.master_port, 1, 3}) old.append(reinterpret_cast<const char*>(&word), sizeof word);
  stranger(std::as_bytes(std::span(old)));
  HelloFrame huge = hello;
  // A hello that announces 2^32 - 1 ranks and a run id without a terminator.
  std::fill(huge.begin() + 8, huge.end(), std::byte{0xff});
  stranger(huge);
  stranger(std::vector<std::byte>(100'000, std::byte{'x'}));
  ranks.push_back(start_rank(rank_of(1, 2, 0), 6));
  check_numbers(ranks, {5, 6});
}

TEST_CASE("strangers: two runs with one MASTER_PORT both finish, each with its own ranks", "[dist][strangers]") {
  constexpr int kWorld = 3;
  std::vector<std::future<Ended>> ranks[2];
  for (int r = kWorld - 1; r >= 0; --r)
    for (const int run : {0, 1}) {
      LaunchEnv env = rank_of(r, kWorld, 1);
      env.run_id = run == 0 ? "night" : "day";
      ranks[run].push_back(start_rank(env, 10 * run + r));
    }
  check_numbers(ranks[0], {0, 1, 2});
  check_numbers(ranks[1], {10, 11, 12});
}

TEST_CASE("strangers: only a process that knows the secret is a rank, and the others learn why", "[dist][strangers]") {
  std::vector<std::future<Ended>> ranks;
  const LaunchEnv first = rank_of(0, 2, 2, kSecret);
  if (!why_no_hmac().empty()) {
    check_error([&] { open_tcp_link(first, 1); }, {"TRIAD_SECRET", "libssl-dev"});
    return;
  }
  ranks.push_back(start_rank(first, 5));
  CHECK(claim(connect_to("127.0.0.1", first.master_port), first, 1, "") == ReplyCode::wrong_secret);
  CHECK(claim(connect_to("127.0.0.1", first.master_port), first, 1, "guessed") == ReplyCode::wrong_secret);
  std::future<Ended> none = start_rank(rank_of(1, 2, 2), 7, kRefusedS),
                     other = start_rank(rank_of(1, 2, 2, "another"), 8, kRefusedS);
  CHECK(has(none.get().error, "it has no TRIAD_SECRET, but rank 0 has one"));
  CHECK(has(other.get().error, "its TRIAD_SECRET is not rank 0's"));
  ranks.push_back(start_rank(rank_of(1, 2, 2, kSecret), 6));
  check_numbers(ranks, {5, 6});
}

TEST_CASE("strangers: a replayed handshake makes nobody a rank", "[dist][strangers]") {
  if (!why_no_hmac().empty()) return;
  std::vector<std::future<Ended>> ranks, again;
  const LaunchEnv first = rank_of(0, 2, 3, kSecret);
  LaunchEnv second = rank_of(1, 2, 3, kSecret);
  Recorder recorder(first.master_port);
  ranks.push_back(start_rank(first, 5));
  second.master_host = Recorder::kHost;
  ranks.push_back(start_rank(second, 6));
  check_numbers(ranks, {5, 6});
  const std::string said = recorder.stop();
  REQUIRE(said.size() == kHelloBytes + sizeof(Mac) + sizeof(int64_t));

  again.push_back(start_rank(first, 7));
  const FileHandle stranger = connect_to("127.0.0.1", first.master_port);
  say(stranger, said.substr(0, kHelloBytes + sizeof(Mac)));
  CHECK(hear(stranger).value_or(Reply{}).code == ReplyCode::prove);
  CHECK(hear(stranger).value_or(Reply{}).code == ReplyCode::wrong_secret);
  again.push_back(start_rank(rank_of(1, 2, 3, kSecret), 8));
  check_numbers(again, {7, 8});
}

TEST_CASE("strangers: a process that does not know the secret passes for no rank 0", "[dist][strangers]") {
  if (!why_no_hmac().empty()) return;
  const LaunchEnv env = rank_of(1, 2, 4, kSecret);
  const std::vector<Socket> listeners = listen_for_ranks(env);
  REQUIRE(listeners.size() == 1);
  REQUIRE(has(address_of(listeners.front()), ":" + std::to_string(env.master_port)));
  std::future<Ended> rank = start_rank(env, 6, kRefusedS);
  pollfd ready{.fd = listeners.front().fd(), .events = POLLIN, .revents = 0};
  while (rank.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    if (poll(&ready, 1, 10) <= 0) continue;
    const FileHandle socket(accept(listeners.front().fd(), nullptr, nullptr));
    HelloFrame hello;
    Mac proof;
    recv(socket.get(), hello.data(), hello.size(), MSG_WAITALL);
    say(socket, encode(Reply{.code = ReplyCode::prove, .world = 2, .payload = fresh_nonce()}));
    recv(socket.get(), proof.data(), proof.size(), MSG_WAITALL);
    // An impostor without the secret can only echo the rank's own proof.
    say(socket, encode(Reply{.code = ReplyCode::welcome, .world = 2, .payload = proof}));
    say(socket, encode(Reply{.code = ReplyCode::begin, .world = 2}));
  }
  const Ended ended = rank.get();
  CHECK(ended.numbers.empty());
  CHECK(has(ended.error, "does not have TRIAD_SECRET"));
}

TEST_CASE("strangers: the first of two that come as one rank is taken, until it closes", "[dist][strangers]") {
  std::vector<std::future<Ended>> ranks;
  const LaunchEnv first = rank_of(0, 3, 5);
  ranks.push_back(start_rank(first, 5));
  {
    const FileHandle stranger = connect_to("127.0.0.1", first.master_port);
    REQUIRE(claim(stranger, first, 1, "") == ReplyCode::welcome);
    const Ended ended = start_rank(rank_of(1, 3, 5), 6, kRefusedS).get();
    INFO(ended.error);
    CHECK(has(ended.error, "refuses rank 1 of 3: another process came first as this rank"));
  }
  for (const int r : {1, 2}) ranks.push_back(start_rank(rank_of(r, 3, 5), 5 + r));
  check_numbers(ranks, {5, 6, 7});
}

TEST_CASE("strangers: a rank that counts other ranks is an error at that rank alone", "[dist][strangers]") {
  std::vector<std::future<Ended>> ranks;
  ranks.push_back(start_rank(rank_of(0, 2, 6), 5));
  const Ended ended = start_rank(rank_of(2, 3, 6), 7).get();
  INFO(ended.error);
  for (const char* words : {"counts 2 ranks", "rank 2 of 3", "WORLD_SIZE", "run strangers"})
    CHECK(has(ended.error, words));
  ranks.push_back(start_rank(rank_of(1, 2, 6), 6));
  check_numbers(ranks, {5, 6});
}

TEST_CASE("strangers: rank 0 listens at MASTER_ADDR alone, and not at all once the ranks have met",
          "[dist][strangers]") {
  LaunchEnv env = rank_of(0, 2, 7);
  const std::string quiet = stderr_of([&] {
    const std::vector<Socket> own = listen_for_ranks(env);
    REQUIRE(own.size() == 1);
    CHECK(has(address_of(own.front()), "127.0.0.1:"));
  });
  CHECK(quiet == "");
  env.master_host = "192.0.2.1";  // an address reserved for documentation (RFC 5737), which no host has
  const std::string warning = stderr_of([&] {
    const std::vector<Socket> all = listen_for_ranks(env);
    REQUIRE(all.size() == 1);
    CHECK((has(address_of(all.front()), "[::]:") || has(address_of(all.front()), "0.0.0.0:")));
  });
  INFO(warning);
  for (const char* words : {"192.0.2.1", "all addresses", "without TRIAD_SECRET"}) CHECK(has(warning, words));

  env.master_host = "::1";
  std::vector<Socket> six;
  stderr_of([&] { six = listen_for_ranks(env); });
  if (has(address_of(six.front()), "[::1]:")) {  // the machine has IPv6
    six.clear();
    std::vector<std::future<Ended>> ranks;
    for (const int r : {0, 1}) {
      env.rank = r;
      ranks.push_back(start_rank(env, 5 + r));
    }
    check_numbers(ranks, {5, 6});
  }

  env = rank_of(0, 2, 7);
  std::future<Ended> other = start_rank(rank_of(1, 2, 7), 6);
  const std::unique_ptr<Link> link = open_tcp_link(env, kMeetS);
  for (int fd = 0; fd < 1000; ++fd) {
    int listens = 0;
    socklen_t size = sizeof listens;
    const bool is_socket = getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0;
    CHECK(!(is_socket && listens != 0));
  }
  int64_t number = 5, numbers[2] = {};
  link->all_gather(&number, numbers, sizeof number);
  CHECK(other.get().numbers == std::vector<int64_t>{5, 6});
}

TEST_CASE("strangers: rank 0 warns in one line if neither an id nor a secret keeps others out", "[dist][strangers]") {
  LaunchEnv env = rank_of(0, 2, 11);
  const auto said = [&] {
    return stderr_of([&] { check_error([&] { gather_ranks(env, 0); }, {"1 of 2 ranks did not come", ": rank 1"}); });
  };
  CHECK(said() == "");
  env.run_id = "";
  const std::string warning = said();
  INFO(warning);
  CHECK(has(warning, "triad: rank 0: warning: no run id"));
  CHECK(warning.find('\n') == warning.size() - 1);
  env.secret = kSecret;
  CHECK(said() == "");
}

TEST_CASE("strangers: a rank that announces 2^60 bytes is an error before there is memory for them",
          "[dist][strangers]") {
  std::string error;
  std::thread first([&] {
    try {
      open_comm(rank_of(0, 2, 8), Device::cpu(), CommBackend::automatic, kMeetS);
    } catch (const std::exception& e) { error = e.what(); }
  });
  {
    const std::unique_ptr<Link> link = open_tcp_link(rank_of(1, 2, 8), kMeetS);
    int64_t size = int64_t{1} << 60, sizes[2] = {};
    link->all_gather(&size, sizes, sizeof size);
    first.join();
  }
  CHECK(has(error, "rank 1 announces 1152921504606846976 bytes"));
}

TEST_CASE("strangers: a frame of the handshake is read as it was written, or refused", "[dist][strangers]") {
  const Hello hello = hello_of(rank_of(1, 3, 9, kSecret), 2);
  const HelloFrame frame = encode(hello);
  const Hello same = decode_hello(frame).value();
  CHECK((same.port == hello.port && same.rank == 2 && same.world == 3 && same.has_secret));
  CHECK((same.run_id == hello.run_id && same.nonce == hello.nonce));
  for (size_t i = 0; i < frame.size(); ++i)
    for (const int bit : {0, 7}) {
      HelloFrame other = frame;
      other[i] ^= std::byte{1} << bit;
      if (const std::optional<Hello> read = decode_hello(other)) CHECK((encode(*read) == other));
    }
  CHECK(!decode_hello(std::span(frame).first(frame.size() - 1)));
  CHECK(!decode_reply(std::span(frame).first(kReplyBytes)));
}

namespace {

constexpr int kKinds = 5;
struct Strangers {
  const LaunchEnv& env;
  const std::string& recorded;
  int met[kKinds] = {}, refused = 0;
  std::vector<FileHandle> silent{};

  void come(int kind) {
    FileHandle socket = try_connect("127.0.0.1", env.master_port);
    if (socket.get() < 0) return void(++refused);
    ++met[kind];
    if (kind == 0) return silent.push_back(std::move(socket));
    HelloFrame hello = encode(hello_of(env, 1));
    if (kind == 1) return say(socket, std::string("GET / HTTP/1.1\r\n\r\n"));
    if (kind == 2) return say(socket, recorded);
    if (kind == 4) std::fill(hello.begin() + 8, hello.end(), std::byte{0xff});  // announces too many ranks and bytes
    say(socket, hello);
    if (kind == 3) say(socket, Mac{});  // claims the rank with a wrong proof
  }
};

std::string start_of(const LaunchEnv& env) {
  return fmt::format(
      "export RANK={0} LOCAL_RANK={0} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR={1} MASTER_PORT={2} "
      "TORCHELASTIC_RUN_ID={3} TRIAD_SECRET='{4}' OMP_NUM_THREADS=1; ulimit -n 64; exec ",
      env.rank, env.master_host, env.master_port, env.run_id, env.secret);
}

}  // namespace

TEST_CASE("strangers: 1,000 connections of five kinds change no bit of 100 steps of two ranks", "[dist][strangers]") {
  if (!why_no_hmac().empty()) return;
  constexpr int kSteps = 100, kAtStart = 500, kMeanwhile = 100, kAll = 1000;
  const TemporaryFolder folder;
  const std::string alone = folder.file("alone"), among = folder.file("among"), more = "--set train.steps=100";
  const LaunchEnv first = rank_of(0, 2, 10, kSecret), second = rank_of(1, 2, 10, kSecret);
  std::string recorded;
  {
    Recorder recorder(first.master_port);
    LaunchEnv by_recorder = second;
    by_recorder.master_host = Recorder::kHost;
    BackgroundProgram zero(train_args(alone, more), start_of(first), folder.file("log_alone")),
        one(train_args(alone, more), start_of(by_recorder));
    CHECK(zero.wait() == 0);
    INFO(read_text(folder.file("log_alone")));
    REQUIRE(one.wait() == 0);
    recorded = recorder.stop().substr(0, kHelloBytes + sizeof(Mac));
  }
  Strangers strangers{.env = first, .recorded = recorded};
  BackgroundProgram zero(train_args(among, more), start_of(first), folder.file("log_among"));
  connect_to("127.0.0.1", first.master_port);  // waits until rank 0 listens
  int i = 0;
  for (; i < kAtStart; ++i) strangers.come(i % kKinds);
  CHECK(strangers.refused == 0);
  BackgroundProgram one(train_args(among, more), start_of(second));
  for (; i < kAtStart + kMeanwhile; ++i) strangers.come(i % kKinds);
  wait_for_text(among + "/training.csv", "step");
  const int while_meeting = i - strangers.refused;
  const int each = (kAll - i) / kSteps;
  for (int step = 0; step < kSteps; ++step) {
    for (int waited = 0; waited < 60000 && lines(among + "/training.csv").size() < static_cast<size_t>(step) + 1;
         ++waited)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (const int end = i + each; i < end; ++i) strangers.come(i % kKinds);
  }
  CHECK(i == kAll);
  CHECK(zero.wait() == 0);
  CHECK(one.wait() == 0);
  const std::string log = read_text(folder.file("log_among"));
  INFO(log);
  std::printf(
      "%d connections: %d while the ranks met (%d silent, %d garbage, %d replayed, %d claims, %d huge), %d found "
      "no port open\n",
      i, while_meeting, strangers.met[0], strangers.met[1], strangers.met[2], strangers.met[3], strangers.met[4],
      strangers.refused);
  CHECK(while_meeting >= kAtStart);
  CHECK(same_file(alone + kWeights, among + kWeights));
  CHECK(column(alone + "/training.csv", "loss") == column(among + "/training.csv", "loss"));
  CHECK(column(among + "/training.csv", "loss").size() == kSteps);
  // The log has few lines about dropped connections, and no file contains the secret.
  size_t told = 0;
  for (const std::string& line : lines(folder.file("log_among"))) told += has(line, "dropped");
  CHECK((told >= 1 && told <= 8));
  CHECK(has(log, "connections were dropped"));
  CHECK(!has(log, kSecret));
  for (const auto& entry : std::filesystem::recursive_directory_iterator(among))
    if (entry.is_regular_file()) CHECK(!has(read_text(entry.path().string()), kSecret));
}
