#include "train/run/stop_signal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <initializer_list>

#include "engine/process/progress_line.h"
#include "engine/process/text.h"

namespace triad {

namespace {

constexpr int kStopSignals[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR2, SIGXCPU};

std::atomic<int> last_signal{0};
// Bits in the next variable: a signal other than SIGINT received, SIGINT received, SIGINT received after another.
constexpr int kTerm = 1, kInt = 2, kTermThenInt = 4;
std::atomic<int> received{0};
std::atomic<int64_t> step_under_way{0}, whole_checkpoint{-1};
// What the acknowledgement says before and after the step; set before the handlers are installed.
std::string promise, limits;

// Text that a signal handler writes: no formatting, no allocation, one write(2).
class Line {
 public:
  Line& operator<<(const char* part) {
    while (*part != '\0' && at_ < text_ + sizeof text_) *at_++ = *part++;
    return *this;
  }
  Line& operator<<(int64_t number) {
    at_ = std::to_chars(at_, text_ + sizeof text_, number).ptr;
    return *this;
  }
  void write() const {
    if (::write(STDERR_FILENO, text_, static_cast<size_t>(at_ - text_)) < 0) return;  // stderr is closed
  }

 private:
  char text_[2000];
  char* at_ = text_;
};

void acknowledge_signal() {
  end_progress_line();
  Line line;
  line << promise.c_str() << " when its step ends (";
  if (step_under_way > 0)
    line << "step " << step_under_way;
  else
    line << "none";
  line << " has begun)" << limits.c_str();
  if ((received & kTermThenInt) != 0)
    line << "; Ctrl-C or SIGTERM again ends at once";
  else if ((received & kInt) != 0)
    line << "; Ctrl-C again ends at once";
  (line << "\n").write();
}

void say_what_is_lost() {
  end_progress_line();
  const int64_t whole = whole_checkpoint, lost = step_under_way - std::max<int64_t>(whole, 0);
  Line line;
  line << "triad: ends at once: ";
  if (lost <= 0)
    line << "no step is lost";
  else
    line << lost << (lost == 1 ? " step is lost" : " steps are lost");
  if (whole >= 0)
    line << "; the last whole checkpoint is that of step " << whole;
  else
    line << "; there is no checkpoint";
  (line << "\n").write();
}

template <bool kAcknowledge>
void on_stop_signal(int number) {
  const int error = errno, own = number == SIGINT ? kInt : kTerm, ends = number == SIGINT ? kInt : kTermThenInt;
  last_signal = number;
  const int before = received.fetch_or(own);
  if ((before & ends) != 0) {
    if (kAcknowledge) say_what_is_lost();
    _exit(stopped_exit_code(number));
  }
  if (number == SIGINT && (before & kTerm) != 0) received |= kTermThenInt;
  if (kAcknowledge && (before & own) == 0) acknowledge_signal();
  errno = error;
}

// When the launcher kills its ranks after it has sent them a signal, as far as they can know.
std::string time_before_kill(const std::string& launcher) {
  if (launcher != "Open MPI")
    return fmt::format("{} may kill it before", launcher == "PMI" ? "the launcher" : launcher);
  for (const char* name : {"OMPI_MCA_odls_base_sigkill_timeout", "PRTE_MCA_odls_base_sigkill_timeout"})
    if (const char* const seconds = std::getenv(name); seconds != nullptr && *seconds != '\0')
      return fmt::format("mpirun kills it {} s after its own signal ({})", shortened(seconds, 20), name);
  return "mpirun may kill it before: by default about a second after its own signal";
}

}  // namespace

void await_stop_signals(bool acknowledge, const std::string& launcher, const std::string& run_folder) {
  promise = "triad: stops with a checkpoint";
  if (!launcher.empty()) {
    constexpr size_t kMostShown = 200;  // characters shown of the folder's name
    promise = "triad: tries to save a checkpoint";
    limits = fmt::format(". {}; a run that makes the file {}/.HALT stops in time{}", time_before_kill(launcher),
                         shortened(run_folder, kMostShown),
                         launcher == "Open MPI" ? ", and so does mpirun --mca odls_base_sigkill_timeout SECONDS" : "");
  }
  for (const int number : kStopSignals) {
    struct sigaction now = {};
    const bool is_ignored = sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
    if (number == SIGHUP && is_ignored) continue;  // nohup ignores it
    std::signal(number, acknowledge ? on_stop_signal<true> : on_stop_signal<false>);
  }
}

int stop_signal() { return last_signal; }
int stopped_exit_code(int signal) { return 128 + signal; }
void step_begins(int64_t step) { step_under_way = step; }
int64_t last_begun_step() { return step_under_way; }
void checkpoint_is_whole(int64_t step) { whole_checkpoint = step; }
std::optional<int64_t> last_whole_checkpoint() {
  const int64_t step = whole_checkpoint;
  return step < 0 ? std::nullopt : std::optional(step);
}

}  // namespace triad
