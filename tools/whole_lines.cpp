#include "tools/whole_lines.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "engine/check.h"

namespace triad {

namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};
std::atomic<int> received = 0;  // the last signal; 0: none

void on_signal(int number) { received = number; }

// A process that ignores a signal at its start, as a job in the background may, goes on ignoring it.
void set_action(void (*action)(int), int flags) {
  for (const int number : kSignals) {
    struct sigaction now {};
    if (sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_IGN) continue;
    now = {};
    now.sa_handler = action;
    now.sa_flags = flags;
    sigaction(number, &now, nullptr);
  }
}

// Cuts a line's first `written` bytes off the end of standard output, if it is a file that ends with them.
void cut_off(off_t written) {
  struct stat file {};
  const off_t at = lseek(STDOUT_FILENO, 0, SEEK_CUR);
  if (fstat(STDOUT_FILENO, &file) != 0 || !S_ISREG(file.st_mode) || at != file.st_size || at < written) return;
  if (ftruncate(STDOUT_FILENO, at - written) == 0) lseek(STDOUT_FILENO, at - written, SEEK_SET);
}

}  // namespace

void write_whole_line(std::string_view line) {
  std::fflush(stdout);
  size_t written = 0;
  while (written < line.size()) {
    const ssize_t n = ::write(STDOUT_FILENO, line.data() + written, line.size() - written);
    if (n >= 0) {
      written += static_cast<size_t>(n);
    } else if (errno != EINTR) {
      const int error = errno;
      cut_off(static_cast<off_t>(written));
      if (error == EPIPE) {  // main recognizes by the stream's error that nobody reads any more
        std::fputc('\n', stdout);
        std::fflush(stdout);
      }
      fail("standard output cannot be written: {}", std::strerror(error));
    }
  }
}

StopRequest::StopRequest() {
  received = 0;
  set_action(on_signal, static_cast<int>(SA_RESETHAND));
}

StopRequest::~StopRequest() { set_action(SIG_DFL, 0); }

bool StopRequest::requested() const { return received != 0; }

void StopRequest::end() const {
  set_action(SIG_DFL, 0);
  std::raise(received);
  std::abort();
}

}  // namespace triad
