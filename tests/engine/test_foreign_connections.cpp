// Connections to rank 0's port that do not belong to the run, while its ranks connect over TCP: connections that are
// silent, send garbage or an incomplete hello, claim a rank, or belong to another run. The run's ranks must connect all
// the same.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/comm/link.h"
#include "tests/support/handshake_peer.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

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

}  // namespace

TEST_CASE("foreign connections: garbage and silent peers neither end nor delay a run that starts", "[dist][foreign]") {
  std::vector<std::future<RankResult>> ranks;
  const LaunchEnv first = rank_of(0, 2, 0);
  ranks.push_back(start_rank(first, 5));
  const HelloFrame hello = encode(hello_of(first, 1));
  std::vector<FileHandle> foreign;
  const auto send_foreign = [&](std::span<const std::byte> bytes) {
    foreign.push_back(connect_to("127.0.0.1", first.master_port));
    send_bytes(foreign.back(), bytes);
  };
  // Connections that send a valid hello, cut short or whole, and then nothing.
  for (const size_t size : {size_t{0}, size_t{1}, size_t{8}, hello.size() - 1, hello.size()})
    send_foreign(std::span(hello).first(size));
  // Earlier versions' hello, without run ids: magic, port, rank 1, world 3. Such a world size ended a run.
  std::string old = "triadlnk";
  for (const int32_t word : {first.master_port, 1, 3}) old.append(reinterpret_cast<const char*>(&word), sizeof word);
  send_foreign(std::as_bytes(std::span(old)));
  HelloFrame huge = hello;
  // A hello with 2^32 - 1 ranks and a run id without a terminator.
  std::fill(huge.begin() + 8, huge.end(), std::byte{0xff});
  send_foreign(huge);
  send_foreign(std::vector<std::byte>(100'000, std::byte{'x'}));
  ranks.push_back(start_rank(rank_of(1, 2, 0), 6));
  check_numbers(ranks, {5, 6});
}

TEST_CASE("foreign connections: two runs with the same MASTER_PORT both finish, each with its own ranks",
          "[dist][foreign]") {
  constexpr int kWorld = 3;
  std::vector<std::future<RankResult>> ranks[2];
  for (int r = kWorld - 1; r >= 0; --r)
    for (const int run : {0, 1}) {
      LaunchEnv env = rank_of(r, kWorld, 1);
      env.run_id = run == 0 ? "night" : "day";
      ranks[run].push_back(start_rank(env, 10 * run + r));
    }
  check_numbers(ranks[0], {0, 1, 2});
  check_numbers(ranks[1], {10, 11, 12});
}

TEST_CASE("foreign connections: of two processes with the same rank the first joins, until it closes its connection",
          "[dist][foreign][waits]") {
  std::vector<std::future<RankResult>> ranks;
  const LaunchEnv first = rank_of(0, 3, 5);
  ranks.push_back(start_rank(first, 5));
  {
    const FileHandle impostor = connect_to("127.0.0.1", first.master_port);
    REQUIRE(handshake_as(impostor, first, 1, "") == ReplyCode::welcome);
    const RankResult result = start_rank(rank_of(1, 3, 5), 6, kRefusedS).get();
    INFO(result.error);
    CHECK(has(result.error, "refuses rank 1 of 3: another process came first as this rank"));
  }
  for (const int r : {1, 2}) ranks.push_back(start_rank(rank_of(r, 3, 5), 5 + r));
  check_numbers(ranks, {5, 6, 7});
}

TEST_CASE("foreign connections: a rank with another world size fails, and the run goes on", "[dist][foreign]") {
  std::vector<std::future<RankResult>> ranks;
  ranks.push_back(start_rank(rank_of(0, 2, 6), 5));
  const RankResult result = start_rank(rank_of(2, 3, 6), 7).get();
  INFO(result.error);
  for (const char* words : {"counts 2 ranks", "rank 2 of 3", "WORLD_SIZE", "run tests"})
    CHECK(has(result.error, words));
  ranks.push_back(start_rank(rank_of(1, 2, 6), 6));
  check_numbers(ranks, {5, 6});
}

TEST_CASE("foreign connections: rank 0 listens at MASTER_ADDR only, and only until all ranks are connected",
          "[dist][foreign]") {
  LaunchEnv env = rank_of(0, 2, 7);
  const std::string quiet = stderr_of([&] {
    const std::vector<Socket> own = listen_for_ranks(env);
    REQUIRE(own.size() == 1);
    CHECK(has(address_of(own.front()), "127.0.0.1:"));
  });
  CHECK(quiet == "");
  env.master_host = "192.0.2.1";  // an address for documentation (RFC 5737), which no host has
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
    std::vector<std::future<RankResult>> ranks;
    for (const int r : {0, 1}) {
      env.rank = r;
      ranks.push_back(start_rank(env, 5 + r));
    }
    check_numbers(ranks, {5, 6});
  }

  env = rank_of(0, 2, 7);
  std::future<RankResult> other = start_rank(rank_of(1, 2, 7), 6);
  const std::unique_ptr<Link> link = open_tcp_link(env, kConnectS);
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

TEST_CASE("foreign connections: without a run id and a secret rank 0 prints a warning of one line", "[dist][foreign]") {
  LaunchEnv env = rank_of(0, 2, 11);
  const auto stderr_text = [&] {
    return stderr_of([&] { check_error([&] { gather_ranks(env, 0); }, {"1 of 2 ranks did not come", ": rank 1"}); });
  };
  CHECK(stderr_text() == "");
  env.run_id = "";
  const std::string warning = stderr_text();
  INFO(warning);
  CHECK(has(warning, "triad: rank 0: warning: no run id"));
  CHECK(warning.find('\n') == warning.size() - 1);
  env.secret = kSecret;
  CHECK(stderr_text() == "");
}

TEST_CASE("foreign connections: a rank that announces 2^60 bytes is an error before memory is allocated",
          "[dist][foreign]") {
  std::string error;
  std::thread first([&] {
    try {
      open_comm(rank_of(0, 2, 8), Device::cpu(), CommBackend::automatic, kConnectS);
    } catch (const std::exception& e) { error = e.what(); }
  });
  {
    const std::unique_ptr<Link> link = open_tcp_link(rank_of(1, 2, 8), kConnectS);
    int64_t size = int64_t{1} << 60, sizes[2] = {};
    link->all_gather(&size, sizes, sizeof size);
    first.join();
  }
  CHECK(has(error, "rank 1 announces 1152921504606846976 bytes"));
}

TEST_CASE("foreign connections: decoding a handshake frame restores it, or refuses it", "[dist][foreign]") {
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
