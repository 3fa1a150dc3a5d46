// Socket: a TCP socket that its destructor closes.
#pragma once
#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace triad {

using TcpClock = std::chrono::steady_clock;

// A TCP address over IPv4 or IPv6, with port.
struct TcpAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool is_loopback() const;
  // Whether this is 0.0.0.0 or [::], which mean all of a host's addresses.
  bool is_unspecified() const;
  void set_port(int port);
  std::string text() const;  // "127.0.0.1:29500"
};

// Resolves a host name or an address in text form; empty, with the reason in *why, on failure.
std::vector<TcpAddress> resolve_tcp(const std::string& host, std::string* why);

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket();
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }

  // Send or receive all bytes, without a time limit. False if the other end has closed.
  bool send(std::span<const std::byte> bytes) const;
  bool receive(std::span<std::byte> bytes) const;

  // Do not block. send_now: false unless all bytes fit into the socket's buffer. receive_now: bytes received, 0 if none
  // has arrived, -1 if the other end has closed.
  bool send_now(std::span<const std::byte> bytes) const;
  int receive_now(std::span<std::byte> bytes) const;

  // Receives all bytes, until `end` at most. late: not all bytes arrived in time; gone: the other end has closed.
  enum class Received { all, late, gone };
  Received receive_until(std::span<std::byte> bytes, TcpClock::time_point end) const;

  // Sets the options for a run's connections: small messages are sent without delay, and keep-alive probes detect an
  // unreachable host within about timeout_s.
  void set_run_options(double timeout_s) const;

 private:
  int fd_;
};

// Connects, until `end` at most. Returns a closed socket, with the reason in *why, on failure.
Socket connect_tcp(const TcpAddress& to, TcpClock::time_point end, std::string* why);

}  // namespace triad
