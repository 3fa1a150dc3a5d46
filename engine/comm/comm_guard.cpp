#include "engine/comm/comm_guard.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "engine/check.h"
#include "engine/process/process_end.h"

namespace triad {

namespace {

// Opens a pidfd. Unlike a pid it never refers to a later process, and poll() reports when the process ends.
int open_process(int pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }
void kill_process(int fd) { syscall(SYS_pidfd_send_signal, fd, SIGKILL, nullptr, 0); }

// Whether a signal has stopped the process, which then cannot end itself.
bool is_stopped(int pid) {
  std::string text;
  std::getline(std::ifstream(fmt::format("/proc/{}/stat", pid)), text);
  const size_t state = text.rfind(')');  // the name before it may contain any character
  return state != std::string::npos && state + 2 < text.size() && text[state + 2] == 'T';
}

}  // namespace

std::string CommGuard::Collective::str() const {
  return fmt::format("collective {}, {}, {} bytes", number, what, bytes);
}

CommGuard::CommGuard(int rank, double timeout_s)
    : rank_(rank),
      timeout_s_(timeout_s),
      wake_(eventfd(0, EFD_CLOEXEC)),
      name_(fmt::format("rank {}", rank)),
      thread_([this] { run(); }) {}

CommGuard::~CommGuard() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  eventfd_write(wake_, 1);
  thread_.join();
  expect_end();
  close(wake_);
}

void CommGuard::watch(const std::vector<LocalPeer>& peers) {
  const std::lock_guard lock(mutex_);
  for (const LocalPeer& peer : peers) {
    const int fd = open_process(peer.pid);
    if (fd >= 0) peers_.push_back({peer.rank, peer.pid, fd});  // Linux before 5.3 has no pidfd
  }
  eventfd_write(wake_, 1);
}

void CommGuard::expect_end() {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) close(peer.fd);
  peers_.clear();
  health_checks_.clear();
}

void CommGuard::add_health_check(std::function<std::string()> health_check) {
  const std::lock_guard lock(mutex_);
  health_checks_.push_back(std::move(health_check));
}

std::string CommGuard::begin(std::string what, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  retire_finished();
  pending_.push_back({++count_, std::move(what), bytes, 0, nullptr});
  last_ = pending_.back().str();
  constexpr size_t kMostRecords = 1000;
  if (records_.size() == kMostRecords) records_.pop_front();
  records_.push_back({count_, pending_.back().what, bytes, now_s()});
  return last_;
}

void CommGuard::end() {
  const std::lock_guard lock(mutex_);
  note_finished(pending_.back().number);
  pending_.pop_back();
}

void CommGuard::record_to(std::string path) {
  const std::lock_guard lock(mutex_);
  records_path_ = std::move(path);
}

void CommGuard::note_finished(int64_t number) {
  if (records_.empty() || number < records_.front().number) return;
  records_[static_cast<size_t>(number - records_.front().number)].finished_s = now_s();
}

// Writes a line to stderr, by write(2) rather than stdio, because the main thread may hold stdio's locks.
void CommGuard::log(const std::string& what) const {
  const std::string text = fmt::format("triad: {}: {}\n", name_, what);
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
}

void CommGuard::write_records(const std::string& why) const {
  if (records_path_.empty()) return;
  std::ofstream file(records_path_);
  file << fmt::format(
              "# rank {}: {}\n# seconds since the rank connected; for a collective on a stream, finished_s is when its "
              "end was observed\n",
              rank_, why)
       << "number,what,bytes,began_s,finished_s\n";
  for (const Record& r : records_)
    file << fmt::format("{},{},{},{:.6f},{}\n", r.number, r.what, r.bytes, r.began_s,
                        r.finished_s < 0 ? "" : fmt::format("{:.6f}", r.finished_s));
}

void CommGuard::end_on(const Stream& stream) {
  std::unique_ptr<Event> event;
  {
    const std::lock_guard lock(mutex_);
    if (!free_events_.empty()) {
      event = std::move(free_events_.back());
      free_events_.pop_back();
    }
  }
  if (!event) event = std::make_unique<Event>(stream.device());
  event->record(stream);  // takes no lock, since it blocks while the stream's queue is full
  const std::lock_guard lock(mutex_);
  pending_.back().event = std::move(event);
}

int64_t CommGuard::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

CommGuard::Last CommGuard::last() const {
  const std::lock_guard lock(mutex_);
  if (pending_.empty()) return {count_, last_, false};
  return {pending_.front().number, pending_.front().str(), true};
}

void CommGuard::retire_finished() {
  while (!pending_.empty() && pending_.front().event && pending_.front().event->reached()) {
    note_finished(pending_.front().number);
    free_events_.push_back(std::move(pending_.front().event));
    pending_.pop_front();
  }
}

// This host's stopped ranks, as text for messages; empty if there are none.
std::string CommGuard::stopped_peers() const {
  std::string text;
  for (const Peer& peer : peers_)
    if (is_stopped(peer.pid)) text += fmt::format("; rank {} (pid {}) is stopped", peer.rank, peer.pid);
  return text;
}

void CommGuard::set_name(const std::string& name) {
  const std::lock_guard lock(mutex_);
  name_ = name;
}

void CommGuard::advise(std::function<std::string()> advice) {
  const std::lock_guard lock(mutex_);
  advice_ = std::move(advice);
}

bool CommGuard::is_lowest_alive() const {
  return std::ranges::all_of(peers_, [&](const Peer& peer) {
    pollfd end{peer.fd, POLLIN, 0};
    return peer.rank > rank_ || poll(&end, 1, 0) > 0;
  });
}

void CommGuard::end_process(const std::string& why) const {
  constexpr double kLogLimitS = 3;
  const bool ends = end_process_within(kLogLimitS);
  for (const Peer& peer : peers_)
    if (is_stopped(peer.pid)) kill_process(peer.fd);
  log(fmt::format("{}. This process ends", why));
  if (ends) write_records(why);
  if (ends && advice_ && is_lowest_alive()) {
    const std::string advice = advice_();
    if (!advice.empty()) log(advice);
  }
  _exit(1);
}

// Checks the library's health and the oldest collective, and ends this process if either has failed. seconds: time to
// add to the collective's waiting time.
void CommGuard::check(double seconds) {
  retire_finished();
  for (const auto& health_check : health_checks_) {
    const std::string wrong = health_check();
    if (!wrong.empty()) end_process(fmt::format("{}; the last: {}", wrong, last_));
  }
  if (pending_.empty()) return;
  Collective& oldest = pending_.front();  // all later collectives wait for it
  oldest.waited_s += seconds;
  if (oldest.waited_s > timeout_s_)
    end_process(
        fmt::format("{}, was not finished within dist.timeout_s = {} s: another rank hangs, is gone or cannot "
                    "be reached{}",
                    oldest.str(), timeout_s_, stopped_peers()));
}

void CommGuard::run() {
  using Clock = std::chrono::steady_clock;
  constexpr int kLookMs = 200;
  Clock::time_point last = Clock::now();
  for (;;) {
    std::vector<pollfd> wait = {{wake_, POLLIN, 0}};
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      for (const Peer& peer : peers_) wait.push_back({peer.fd, POLLIN, 0});
    }
    poll(wait.data(), wait.size(), kLookMs);
    if (wait[0].revents != 0) {
      eventfd_t ignored;
      eventfd_read(wake_, &ignored);
    }
    const Clock::time_point now = Clock::now();
    // The most seconds that one check may count, so that time while this process was itself stopped does not count.
    constexpr double kMostSeconds = 1;
    const double seconds = std::min(kMostSeconds, std::chrono::duration<double>(now - last).count());
    last = now;

    const std::lock_guard lock(mutex_);
    if (stop_) return;
    try {
      std::vector<std::string> gone;  // there are several if one rank's end has ended another
      for (const Peer& peer : peers_)
        for (const pollfd& p : wait)
          if (p.fd == peer.fd && (p.revents & POLLIN) != 0)
            gone.push_back(fmt::format("rank {} (pid {})", peer.rank, peer.pid));
      if (!gone.empty())
        end_process(fmt::format(
            "{} {} ended before the run did; {}: {}", fmt::join(gone, " and "), gone.size() == 1 ? "has" : "have",
            pending_.empty() ? "the last collective" : "under way", pending_.empty() ? last_ : pending_.front().str()));
      check(seconds);
    } catch (const std::exception& e) { end_process(e.what()); }
  }
}

}  // namespace triad
