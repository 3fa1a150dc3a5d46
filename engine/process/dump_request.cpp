#include "engine/process/dump_request.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>

namespace triad {

namespace {

std::atomic<int> wake_fd{-1};
std::atomic<bool> requested{false};

void on_dump_request(int) {
  const int error = errno;
  requested = true;
  if (const int fd = wake_fd; fd >= 0) {
    const uint64_t one = 1;
    if (::write(fd, &one, sizeof one) < 0)
      errno = error;  // the watchdog still sees `requested` at its next check if this fails
  }
  errno = error;
}

}  // namespace

void keep_dump_requests() { std::signal(SIGUSR1, on_dump_request); }
void wake_on_dump_request(int fd) { wake_fd = fd; }
bool take_dump_request() { return requested.exchange(false); }

}  // namespace triad
