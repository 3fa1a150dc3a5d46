// Peers for testing how ranks connect over TCP (engine/comm/rendezvous.h): ranks that run as threads here, and
// connections that send chosen bytes to rank 0's port. All use 127.0.0.0/8 or [::1].
#pragma once
#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/comm/handshake.h"
#include "engine/comm/launch_env.h"
#include "engine/comm/rendezvous.h"
#include "io/file.h"

namespace triad::test {

// Timeout for ranks that connect. They need less, unless a foreign connection blocks rank 0: then they fail.
inline constexpr double kConnectS = 40;  // seconds
// Timeout for a rank that rank 0 refuses; it retries until then.
inline constexpr double kRefusedS = 5;  // seconds
inline constexpr const char* kSecret = "tests only: not a secret";

// A rank's environment as torchrun sets it. `test` selects the MASTER_PORT, a free one for each number.
LaunchEnv rank_of(int rank, int world, int test, const std::string& secret = "");

// A rank's outcome: the numbers gathered from all ranks, or the error.
struct RankResult {
  std::vector<int64_t> numbers;
  std::string error;
};
// Starts a thread that connects as this rank and gathers one number from each rank.
std::future<RankResult> start_rank(LaunchEnv env, int64_t number, double timeout_s = kConnectS);
// Waits for the ranks and checks that each has gathered these numbers.
void check_numbers(std::vector<std::future<RankResult>>& ranks, const std::vector<int64_t>& numbers);

FileHandle try_connect(const std::string& host, int port);  // FileHandle(-1) if no process listens there
FileHandle connect_to(const std::string& host, int port);   // retries for a minute, then throws

template <class Bytes>
void send_bytes(const FileHandle& socket, const Bytes& bytes) {
  send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}
// Rank 0's next reply; nullopt if rank 0 closes the connection or sends anything else.
std::optional<Reply> receive_reply(const FileHandle& socket);

// The first frame that a rank sends, with a fresh nonce.
Hello hello_of(const LaunchEnv& env, int rank);

// Makes a whole handshake as the given rank with the given secret, and returns rank 0's last reply code.
std::optional<ReplyCode> handshake_as(const FileHandle& socket, const LaunchEnv& env, int rank,
                                      const std::string& secret);

// A relay between a rank, whose MASTER_ADDR is 127.0.0.2, and rank 0 at 127.0.0.1. It records what the rank sends.
class Recorder {
 public:
  explicit Recorder(int port);
  ~Recorder() { stop(); }
  // Stops the relay and returns the bytes that the rank sent over the last connection.
  std::string stop();
  static constexpr const char* kHost = "127.0.0.2";

 private:
  void run();
  void relay(const FileHandle& rank);

  int port_;
  FileHandle listener_;
  std::atomic<bool> stop_ = false;
  std::string recorded_;
  std::thread thread_;
};

std::string address_of(const Socket& socket);  // the address to which it is bound, such as "127.0.0.1:29500"

}  // namespace triad::test
