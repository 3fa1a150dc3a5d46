// Opens rank 0's listening sockets (listen_for_ranks() in rendezvous.h).
#include <fmt/format.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "engine/check.h"
#include "engine/comm/rendezvous.h"

namespace triad {

namespace {

// Returns a socket bound to the address; closed, with errno set, on failure.
Socket bind_to(const TcpAddress& address) {
  Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1, off = 0;
  if (!socket.open()) return socket;
  setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.storage.ss_family ==
      AF_INET6) {  // the IPv6 wildcard address accepts IPv4 too; a single IPv6 address must not
    setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, address.is_unspecified() ? &off : &on, sizeof on);
  }
  if (bind(socket.fd(), address.get(), address.size) == 0) return socket;
  const int error = errno;
  socket = Socket();
  errno = error;
  return socket;
}

TcpAddress all_addresses() {
  TcpAddress address;
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  six.sin6_addr = in6addr_any;
  std::memcpy(&address.storage, &six, address.size = sizeof six);
  if (Socket(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0)).open()) return address;
  sockaddr_in four{};  // 0.0.0.0, used if the kernel has no IPv6
  four.sin_family = AF_INET;
  std::memcpy(&address.storage, &four, address.size = sizeof four);
  return address;
}

// MASTER_ADDR's addresses that belong to this host. If there are none, rank 0 must listen at all addresses, and `why`
// gives the reason.
std::vector<TcpAddress> own_addresses(const LaunchEnv& env, std::string* why) {
  std::vector<TcpAddress> own = resolve_tcp(env.master_host, why);
  if (own.empty()) return own;
  const auto is_foreign = [](const TcpAddress& address) {  // tries to bind to port 0, which means any free port
    return address.is_unspecified() || !bind_to(address).open();
  };
  std::erase_if(own, is_foreign);
  if (own.empty()) *why = "no address of this host";
  // Distributions map a host's own name to a loopback address, to which ranks on other hosts cannot connect.
  const bool all_here = env.local_world == env.world || env.master_host == "localhost";
  const auto is_inner = [&](const TcpAddress& a) {
    std::string number = a.text();
    number.resize(number.rfind(':'));
    return a.is_loopback() && number != env.master_host && number != "[" + env.master_host + "]";
  };
  if (!own.empty() && !all_here && std::all_of(own.begin(), own.end(), is_inner)) {
    *why = "a loopback address on this host, which other hosts cannot reach";
    own.clear();
  }
  return own;
}

// Opens a listening socket at each address, all at this port. Returns none, with errno set, if the port is in use at
// one of them.
std::vector<Socket> listen_at(std::vector<TcpAddress> addresses, int port) {
  std::vector<Socket> sockets;
  for (TcpAddress& address : addresses) {
    address.set_port(port);
    sockets.push_back(bind_to(address));
    if (!sockets.back().open() || listen(sockets.back().fd(), SOMAXCONN) != 0) {
      const int error = errno;
      sockets.clear();
      errno = error;
      return sockets;
    }
  }
  return sockets;
}

}  // namespace

Ports ports_of(const LaunchEnv& env) {
  constexpr int kPorts = 16, kPortsEnd = 1 << 16;
  const int begin = env.master_port + (env.port_taken ? 1 : 0);
  return {begin, std::min(begin + kPorts, kPortsEnd)};
}

std::vector<Socket> listen_for_ranks(const LaunchEnv& env) {
  std::string why;
  std::vector<TcpAddress> addresses = own_addresses(env, &why);
  if (addresses.empty()) {
    const char* const risk = "; without TRIAD_SECRET anyone who reaches one of them may claim a rank";
    log_line(env, fmt::format("warning: listens at all addresses of this host (MASTER_ADDR \"{}\": {}){}",
                              env.master_host, why, env.secret.empty() ? risk : ""));
    addresses.push_back(all_addresses());
  }
  const Ports ports = ports_of(env);
  for (int port = ports.begin; port < ports.end; ++port)
    if (std::vector<Socket> sockets = listen_at(addresses, port); !sockets.empty()) return sockets;
  fail("rank 0 cannot listen at {}, ports {} to {}: {}", env.master_host, ports.begin, ports.end - 1,
       std::strerror(errno));
}

}  // namespace triad
