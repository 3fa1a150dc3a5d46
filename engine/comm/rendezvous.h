// Where the ranks of a run find each other over TCP: rank 0 listens at MASTER_ADDR:MASTER_PORT or at one of the next
// ports, the others connect to it, and both ends pass the handshake of handshake.h. Anything else that connects is
// dropped with a message and costs the run nothing but a descriptor for a short time.
#pragma once
#include <string>
#include <vector>

#include "engine/comm/launch_env.h"
#include "engine/comm/tcp_socket.h"

namespace triad {

// Rank 0: a socket to each rank, [0] closed. Throws if a rank has not come within timeout_s. No port stays open.
std::vector<Socket> gather_ranks(const LaunchEnv&, double timeout_s);

// Any other rank: a socket to rank 0, when all ranks are there.
Socket join_rank_0(const LaunchEnv&, double timeout_s);

// The ports [begin, end) to look at: torchrun's own store may have MASTER_PORT, and other runs the next ones.
struct Ports {
  int begin = 0, end = 0;
};
Ports ports_of(const LaunchEnv&);

// Rank 0's listening sockets, all at one port: at MASTER_ADDR if that is an address of this host, else at all of its
// addresses, with a warning.
std::vector<Socket> listen_for_ranks(const LaunchEnv&);

// One line on stderr.
void log_line(const LaunchEnv&, const std::string& text);

}  // namespace triad
