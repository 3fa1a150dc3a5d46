// A TCP socket, closed at the end of its scope.
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

// Of one end of a connection, or of one to be.
struct TcpAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool is_loopback() const;
  bool is_unspecified() const;  // 0.0.0.0 or [::]: all of a host's
  void set_port(int port);
  std::string text() const;  // "127.0.0.1:29500"
};

// The addresses that a host's name or an address's text stands for; empty, and why, if there is none.
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

  // Both wait as long as it takes. False if the other end is gone.
  bool send(std::span<const std::byte> bytes) const;
  bool receive(std::span<std::byte> bytes) const;

  // Never wait. send_now: false unless all bytes fit into the socket's buffer. receive_now: how many bytes came, 0 for
  // none yet, and -1 if the other end is gone.
  bool send_now(std::span<const std::byte> bytes) const;
  int receive_now(std::span<std::byte> bytes) const;

  // Waits until `end`. late: not all bytes came by then; gone: the other end closed.
  enum class Came { all, late, gone };
  Came receive_until(std::span<std::byte> bytes, TcpClock::time_point end) const;

  // For the run: a small message is sent at once, and probes keep an idle connection alive and find a host that is gone
  // within about timeout_s.
  void prepare(double timeout_s) const;

 private:
  int fd_;
};

// Open if the other end accepts before `end`; else closed, and why.
Socket connect_tcp(const TcpAddress& to, TcpClock::time_point end, std::string* why);

}  // namespace triad
