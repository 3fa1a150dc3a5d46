// TRIAD_SECRET: processes without it can neither join a run nor pass as its rank 0, a recorded handshake cannot be
// replayed, and a thousand foreign connections change no bit in a run's results.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "engine/comm/link.h"
#include "tests/support/dist_run.h"
#include "tests/support/handshake_peer.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

bool require_hmac() { return why_no_hmac().empty() || skip(why_no_hmac()); }

}  // namespace

TEST_CASE("run secret: a process without it cannot join the run, and its error gives the reason",
          "[dist][secret][waits]") {
  std::vector<std::future<RankResult>> ranks;
  const LaunchEnv first = rank_of(0, 2, 2, kSecret);
  if (!why_no_hmac().empty()) {
    check_error([&] { open_tcp_link(first, 1); }, {"TRIAD_SECRET", "libssl-dev"});
    return;
  }
  ranks.push_back(start_rank(first, 5));
  CHECK(handshake_as(connect_to("127.0.0.1", first.master_port), first, 1, "") == ReplyCode::wrong_secret);
  CHECK(handshake_as(connect_to("127.0.0.1", first.master_port), first, 1, "guessed") == ReplyCode::wrong_secret);
  std::future<RankResult> none = start_rank(rank_of(1, 2, 2), 7, kRefusedS),
                          other = start_rank(rank_of(1, 2, 2, "another"), 8, kRefusedS);
  CHECK(has(none.get().error, "it has no TRIAD_SECRET, but rank 0 has one"));
  CHECK(has(other.get().error, "its TRIAD_SECRET is not rank 0's"));
  ranks.push_back(start_rank(rank_of(1, 2, 2, kSecret), 6));
  check_numbers(ranks, {5, 6});
}

TEST_CASE("run secret: a replayed handshake is refused", "[dist][secret]") {
  if (!require_hmac()) return;
  std::vector<std::future<RankResult>> ranks, again;
  const LaunchEnv first = rank_of(0, 2, 3, kSecret);
  LaunchEnv second = rank_of(1, 2, 3, kSecret);
  Recorder recorder(first.master_port);
  ranks.push_back(start_rank(first, 5));
  second.master_host = Recorder::kHost;
  ranks.push_back(start_rank(second, 6));
  check_numbers(ranks, {5, 6});
  const std::string sent = recorder.stop();
  REQUIRE(sent.size() == kHelloBytes + sizeof(Mac) + sizeof(int64_t));

  again.push_back(start_rank(first, 7));
  const FileHandle replayer = connect_to("127.0.0.1", first.master_port);
  send_bytes(replayer, sent.substr(0, kHelloBytes + sizeof(Mac)));
  CHECK(receive_reply(replayer).value_or(Reply{}).code == ReplyCode::prove);
  CHECK(receive_reply(replayer).value_or(Reply{}).code == ReplyCode::wrong_secret);
  again.push_back(start_rank(rank_of(1, 2, 3, kSecret), 8));
  check_numbers(again, {7, 8});
}

TEST_CASE("run secret: ranks refuse a rank 0 without it", "[dist][secret][waits]") {
  if (!require_hmac()) return;
  const LaunchEnv env = rank_of(1, 2, 4, kSecret);
  const std::vector<Socket> listeners = listen_for_ranks(env);
  REQUIRE(listeners.size() == 1);
  REQUIRE(has(address_of(listeners.front()), ":" + std::to_string(env.master_port)));
  std::future<RankResult> rank = start_rank(env, 6, kRefusedS);
  pollfd ready{.fd = listeners.front().fd(), .events = POLLIN, .revents = 0};
  while (rank.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    if (poll(&ready, 1, 10) <= 0) continue;
    const FileHandle socket(accept(listeners.front().fd(), nullptr, nullptr));
    HelloFrame hello;
    Mac proof;
    recv(socket.get(), hello.data(), hello.size(), MSG_WAITALL);
    send_bytes(socket, encode(Reply{.code = ReplyCode::prove, .world = 2, .payload = fresh_nonce()}));
    recv(socket.get(), proof.data(), proof.size(), MSG_WAITALL);
    // An impostor without the secret can only echo the rank's own proof.
    send_bytes(socket, encode(Reply{.code = ReplyCode::welcome, .world = 2, .payload = proof}));
    send_bytes(socket, encode(Reply{.code = ReplyCode::begin, .world = 2}));
  }
  const RankResult result = rank.get();
  CHECK(result.numbers.empty());
  CHECK(has(result.error, "does not have TRIAD_SECRET"));
}

namespace {

// Opens foreign connections for the test below, and counts how many rank 0 accepts and refuses.
struct ForeignConnections {
  enum Kind { silent, garbage, replayed, false_proof, oversized, kKinds };

  const LaunchEnv& env;
  const std::string& recorded;  // what a rank sent in a successful handshake
  int accepted[kKinds] = {};    // accepted connections by kind
  int refused = 0;              // connections refused because rank 0 no longer listens
  std::vector<FileHandle> open_sockets{};

  void open(int number) {
    const int kind = number % kKinds;
    FileHandle socket = try_connect("127.0.0.1", env.master_port);
    if (socket.get() < 0) return void(++refused);
    ++accepted[kind];
    if (kind == silent) return open_sockets.push_back(std::move(socket));
    if (kind == garbage) return send_bytes(socket, std::string("GET / HTTP/1.1\r\n\r\n"));
    if (kind == replayed) return send_bytes(socket, recorded);
    HelloFrame hello = encode(hello_of(env, 1));
    // oversized: all sizes are the largest numbers, and no zero ends the run id.
    if (kind == oversized) std::fill(hello.begin() + 8, hello.end(), std::byte{0xff});
    send_bytes(socket, hello);
    if (kind == false_proof) send_bytes(socket, Mac{});
  }
};

// A shell prefix that starts a program as this rank. Few files may be open, so connections that stay open would be
// noticed.
std::string launch_prefix(const LaunchEnv& env) {
  return fmt::format(
      "export RANK={0} LOCAL_RANK={0} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR={1} MASTER_PORT={2} "
      "TORCHELASTIC_RUN_ID={3} TRIAD_SECRET='{4}' OMP_NUM_THREADS=1; ulimit -n 64; exec ",
      env.rank, env.master_host, env.master_port, env.run_id, env.secret);
}

}  // namespace

TEST_CASE("run secret: 1,000 foreign connections of five kinds change no bit of 100 steps of two ranks",
          "[dist][secret]") {
  if (!require_hmac()) return;
  constexpr int kSteps = 100, kAtStart = 500, kBeforeFirstStep = 100, kAll = 1000;
  const TemporaryFolder folder;
  const std::string undisturbed = folder.file("undisturbed"), disturbed = folder.file("disturbed"),
                    more = "--set train.steps=100";
  const LaunchEnv first = rank_of(0, 2, 10, kSecret), second = rank_of(1, 2, 10, kSecret);
  std::string recorded;
  {
    Recorder recorder(first.master_port);
    LaunchEnv through_recorder = second;
    through_recorder.master_host = Recorder::kHost;
    BackgroundProgram zero(train_args(undisturbed, more), launch_prefix(first), folder.file("log_undisturbed")),
        one(train_args(undisturbed, more), launch_prefix(through_recorder));
    CHECK(zero.wait() == 0);
    INFO(read_text(folder.file("log_undisturbed")));
    REQUIRE(one.wait() == 0);
    recorded = recorder.stop().substr(0, kHelloBytes + sizeof(Mac));
  }
  ForeignConnections foreign{.env = first, .recorded = recorded};
  BackgroundProgram zero(train_args(disturbed, more), launch_prefix(first), folder.file("log_disturbed"));
  connect_to("127.0.0.1", first.master_port);  // retries until rank 0 listens
  int i = 0;
  for (; i < kAtStart; ++i) foreign.open(i);
  CHECK(foreign.refused == 0);
  BackgroundProgram one(train_args(disturbed, more), launch_prefix(second));
  for (; i < kAtStart + kBeforeFirstStep; ++i) foreign.open(i);
  wait_for_text(disturbed + "/training.csv", "step");
  const int during_startup = i - foreign.refused;
  const int each = (kAll - i) / kSteps;
  for (int step = 0; step < kSteps; ++step) {
    for (int waited = 0; waited < 60000 && lines(disturbed + "/training.csv").size() < static_cast<size_t>(step) + 1;
         ++waited)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (const int end = i + each; i < end; ++i) foreign.open(i);
  }
  CHECK(i == kAll);
  CHECK(zero.wait() == 0);
  CHECK(one.wait() == 0);
  const std::string log = read_text(folder.file("log_disturbed"));
  INFO(log);
  std::printf(
      "%d connections: %d while the ranks connected (%d silent, %d garbage, %d replayed, %d with a false proof, "
      "%d oversized), %d found no port open\n",
      i, during_startup, foreign.accepted[ForeignConnections::silent], foreign.accepted[ForeignConnections::garbage],
      foreign.accepted[ForeignConnections::replayed], foreign.accepted[ForeignConnections::false_proof],
      foreign.accepted[ForeignConnections::oversized], foreign.refused);
  CHECK(during_startup >= kAtStart);
  CHECK(same_file(undisturbed + kWeights, disturbed + kWeights));
  CHECK(column(undisturbed + "/training.csv", "loss") == column(disturbed + "/training.csv", "loss"));
  CHECK(column(disturbed + "/training.csv", "loss").size() == kSteps);
  // The log has at most 8 lines about dropped connections, and no file contains the secret.
  size_t dropped_lines = 0;
  for (const std::string& line : lines(folder.file("log_disturbed"))) dropped_lines += has(line, "dropped");
  CHECK((dropped_lines >= 1 && dropped_lines <= 8));
  CHECK(has(log, "connections were dropped"));
  CHECK(!has(log, kSecret));
  for (const auto& entry : std::filesystem::recursive_directory_iterator(disturbed))
    if (entry.is_regular_file()) CHECK(!has(read_text(entry.path().string()), kSecret));
}
