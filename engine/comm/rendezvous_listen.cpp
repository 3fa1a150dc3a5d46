// Where rank 0 listens.
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

// A socket bound to the address; closed, with errno set, if it cannot be.
Socket bind_to(const TcpAddress& address) {
  Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1, off = 0;
  if (!socket.open()) return socket;
  setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.storage.ss_family == AF_INET6) {  // "all addresses" means those of IPv4 too; a single one does not
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
  sockaddr_in four{};  // a kernel without IPv6
  four.sin_family = AF_INET;
  std::memcpy(&address.storage, &four, address.size = sizeof four);
  return address;
}

// MASTER_ADDR's addresses that are this host's. Empty: all of the host's are to be listened at, and why.
std::vector<TcpAddress> own_addresses(const LaunchEnv& env, std::string* why) {
  std::vector<TcpAddress> own = resolve_tcp(env.master_host, why);
  if (own.empty()) return own;
  const auto is_foreign = [](const TcpAddress& address) {  // its port is 0 yet: any
    return address.is_unspecified() || !bind_to(address).open();
  };
  std::erase_if(own, is_foreign);
  if (own.empty()) *why = "no address of this host";
  // Distributions give a host's own name a loopback address, which ranks of other hosts cannot connect to.
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

// All of the addresses at that port; empty, with errno set, if one is taken.
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
