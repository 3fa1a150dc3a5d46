#include "engine/comm/tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>

namespace triad {

namespace {

// Polls until `events` occur or the time `end`; true if they occurred.
bool wait_for(int fd, short events, TcpClock::time_point end) {
  for (;;) {
    constexpr int64_t kLongestMs = 60'000;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - TcpClock::now()).count();
    pollfd ready{.fd = fd, .events = events, .revents = 0};
    if (poll(&ready, 1, static_cast<int>(std::clamp<int64_t>(left, 0, kLongestMs))) > 0) return true;
    if (left <= 0) return false;
  }
}

}  // namespace

bool TcpAddress::is_loopback() const {
  constexpr uint32_t kNet = 127, kNetShift = 24;
  if (storage.ss_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr) >> kNetShift == kNet;
  return storage.ss_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr);
}

bool TcpAddress::is_unspecified() const {
  if (storage.ss_family == AF_INET)
    return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr == htonl(INADDR_ANY);
  return storage.ss_family == AF_INET6 &&
         IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr);
}

void TcpAddress::set_port(int port) {
  const uint16_t wire = htons(static_cast<uint16_t>(port));
  if (storage.ss_family == AF_INET)
    reinterpret_cast<sockaddr_in*>(&storage)->sin_port = wire;
  else
    reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port = wire;
}

std::string TcpAddress::text() const {
  char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "?";
  getnameinfo(get(), size, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  const bool six = std::strchr(host, ':') != nullptr;
  return (six ? "[" : "") + std::string(host) + (six ? "]:" : ":") + port;
}

std::vector<TcpAddress> resolve_tcp(const std::string& host, std::string* why) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0) {
    *why = gai_strerror(error);
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  std::vector<TcpAddress> addresses;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    if ((a->ai_family != AF_INET && a->ai_family != AF_INET6) || a->ai_addrlen > sizeof(sockaddr_storage)) continue;
    TcpAddress address;
    std::memcpy(&address.storage, a->ai_addr, a->ai_addrlen);
    address.size = a->ai_addrlen;
    const auto is_same = [&](const TcpAddress& other) { return other.text() == address.text(); };
    if (std::none_of(addresses.begin(), addresses.end(), is_same)) addresses.push_back(address);
  }
  if (addresses.empty()) *why = "no IPv4 or IPv6 address";
  return addresses;
}

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

bool Socket::send(std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return true;
}

bool Socket::receive(std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t n = recv(fd_, bytes.data(), bytes.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return true;
}

bool Socket::send_now(std::span<const std::byte> bytes) const {
  return ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
}

int Socket::receive_now(std::span<std::byte> bytes) const {
  for (;;) {
    const ssize_t n = recv(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (n > 0) return static_cast<int>(n);
    if (n < 0 && errno == EINTR) continue;
    return n < 0 && errno == EAGAIN ? 0 : -1;
  }
}

Socket::Received Socket::receive_until(std::span<std::byte> bytes, TcpClock::time_point end) const {
  while (!bytes.empty()) {
    if (!wait_for(fd_, POLLIN, end)) return Received::late;
    const int n = receive_now(bytes);
    if (n < 0) return Received::gone;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return Received::all;
}

void Socket::set_run_options(double timeout_s) const {
  constexpr int kIdleS = 30, kProbeS = 10, kMostProbes = 127;
  const auto set = [&](int level, int option, int value) { setsockopt(fd_, level, option, &value, sizeof value); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kIdleS);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kProbeS);
  set(IPPROTO_TCP, TCP_KEEPCNT, static_cast<int>(std::clamp(timeout_s / kProbeS, 1.0, double{kMostProbes})));
}

Socket connect_tcp(const TcpAddress& to, TcpClock::time_point end, std::string* why) {
  Socket socket(::socket(to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int error = 0;
  socklen_t size = sizeof error;
  if (!socket.open() || (connect(socket.fd(), to.get(), to.size) != 0 && errno != EINPROGRESS))
    error = errno;
  else if (!wait_for(socket.fd(), POLLOUT, end))
    error = ETIMEDOUT;
  else if (getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0)
    error = errno;
  if (error == 0 && fcntl(socket.fd(), F_SETFL, fcntl(socket.fd(), F_GETFL) & ~O_NONBLOCK) != 0) error = errno;
  if (error == 0) return socket;
  *why = std::strerror(error);
  return Socket();
}

}  // namespace triad
