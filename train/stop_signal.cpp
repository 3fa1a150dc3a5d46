#include "train/stop_signal.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <initializer_list>

#include "engine/process/progress_line.h"

namespace triad {

namespace {

std::atomic<int> last_signal{0};
// The bits of the next variable: SIGTERM received, SIGINT received, SIGINT received after SIGTERM.
constexpr int kTerm = 1, kInt = 2, kTermThenInt = 4;
std::atomic<int> received{0};
std::atomic<int64_t> step_under_way{0};

// Runs in a signal handler: no formatting, no allocation, one write(2).
void acknowledge_signal() {
  end_progress_line();
  char text[200], *at = text;
  const auto add = [&](const char* part) { at = stpcpy(at, part); };
  add("triad: stops with a checkpoint when its step ends (");
  if (step_under_way > 0) {
    add("step ");
    at = std::to_chars(at, text + sizeof text, step_under_way.load()).ptr;
    *at = '\0';
  } else {
    add("none");
  }
  add(" has begun)");
  add((received & kTermThenInt) != 0 ? "; Ctrl-C or SIGTERM again ends at once\n"
      : (received & kInt) != 0       ? "; Ctrl-C again ends at once\n"
                                     : "\n");
  if (::write(STDERR_FILENO, text, static_cast<size_t>(at - text)) < 0) return;  // stderr is closed
}

template <bool kAcknowledge>
void on_stop_signal(int number) {
  const int error = errno, own = number == SIGINT ? kInt : kTerm, ends = number == SIGINT ? kInt : kTermThenInt;
  last_signal = number;
  const int before = received.fetch_or(own);
  if ((before & ends) != 0) _exit(1);
  if (number == SIGINT && (before & kTerm) != 0) received |= kTermThenInt;
  if (kAcknowledge && (before & own) == 0) acknowledge_signal();
  errno = error;
}

}  // namespace

void await_stop_signals(bool acknowledge) {
  for (const int number : {SIGTERM, SIGINT})
    std::signal(number, acknowledge ? on_stop_signal<true> : on_stop_signal<false>);
}

int stop_signal() { return last_signal; }
void step_begins(int64_t step) { step_under_way = step; }

}  // namespace triad
