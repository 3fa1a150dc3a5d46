// Connects a run's ranks over TCP: rank 0 listens at MASTER_ADDR:MASTER_PORT or at one of the next ports, the other
// ranks connect to it, and both ends pass handshake.h's handshake. Rank 0 drops any other connection with a message.
#pragma once
#include <string>
#include <vector>

#include "engine/comm/launch_env.h"
#include "engine/comm/tcp_socket.h"

namespace triad {

// For rank 0: returns a socket to each rank, by rank; the one at index 0, rank 0 itself, is closed. Closes the
// listening port. Throws if a rank is missing after timeout_s.
std::vector<Socket> gather_ranks(const LaunchEnv&, double timeout_s);

// For the other ranks: returns a socket to rank 0 once all ranks have connected. Throws after timeout_s.
Socket join_rank_0(const LaunchEnv&, double timeout_s);

// The ports [begin, end) that the ranks try in order: torchrun's own store may use MASTER_PORT, and other runs the next
// ports.
struct Ports {
  int begin = 0, end = 0;
};
Ports ports_of(const LaunchEnv&);

// Opens rank 0's listening sockets, all at one port: at MASTER_ADDR if it is this host's address, else at all of the
// host's addresses, with a warning.
std::vector<Socket> listen_for_ranks(const LaunchEnv&);

// Writes one line to stderr.
void log_line(const LaunchEnv&, const std::string& text);

}  // namespace triad
