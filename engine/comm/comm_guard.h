// CommGuard: a thread in each rank that ends the process when the run cannot continue. It tracks the collectives under
// way, on the host or on a stream, and the other ranks' processes on this host. If a collective does not finish within
// dist.timeout_s, or a rank ends before the run does, it logs the collective's number, name and bytes to stderr, writes
// the last 1,000 collectives to a file within a bounded time, and exits with 1. It does not throw instead, because the
// main thread may block inside a library for a rank that never arrives.
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/stream.h"

namespace triad {

// Another rank's process on this host.
struct LocalPeer {
  int rank = 0, pid = 0;
};

class CommGuard {
 public:
  CommGuard(int rank, double timeout_s);
  ~CommGuard();
  CommGuard(const CommGuard&) = delete;

  // From now on, until expect_end(), this process ends if one of these does.
  void watch(const std::vector<LocalPeer>& peers);
  void expect_end();
  // Adds a function that the guard calls periodically: it returns what is wrong with the library, or "".
  void add_health_check(std::function<std::string()> health_check);

  void set_name(const std::string& name);  // this rank's, in messages
  // When the guard ends the process, it logs a line with what advice() returns, unless that is empty or takes seconds,
  // as on a file system that hangs. Of a host's ranks those say it that know of no lower one that lives.
  void advise(std::function<std::string()> advice);

  // Starts a collective: its name ("all_reduce of bucket 3") and its bytes on this rank. It is finished when end() is
  // called, or when the stream reaches the point where end_on() was called. begin() returns the collective's
  // description for messages.
  std::string begin(std::string what, int64_t bytes);
  void end();
  void end_on(const Stream&);
  int64_t count() const;  // collectives begun so far

  // The oldest collective under way, which all later ones wait for; if there is none, the last finished one.
  struct Last {
    int64_t number = 0;
    std::string what = "none";
    bool under_way = false;
  };
  Last last() const;  // what the guard last saw on a stream, at most 0.2 s ago
  // Sets the file that receives the last collectives when the guard ends the process: one row for each, with the
  // seconds of its start and observed end.
  void record_to(std::string path);

 private:
  struct Collective {
    int64_t number = 0;
    std::string what;
    int64_t bytes = 0;
    double waited_s = 0;
    std::unique_ptr<Event> event;  // marks where a collective ends on a stream
    std::string str() const;
  };
  // A row in record_to()'s file. Times in seconds since the guard's construction; finished_s < 0: its end was not
  // observed.
  struct Record {
    int64_t number = 0;
    std::string what;
    int64_t bytes = 0;
    double began_s = 0, finished_s = -1;
  };
  struct Peer {
    int rank, pid, fd;
  };
  void run();
  void check(double seconds);
  void retire_finished();
  double now_s() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count(); }
  void note_finished(int64_t number);
  void write_records(const std::string& why) const;
  std::string stopped_peers() const;
  [[noreturn]] void end_process(const std::string& why) const;

  void log(const std::string& what) const;
  bool is_lowest_alive() const;

  const int rank_;
  const double timeout_s_;
  const int wake_;  // eventfd that wakes the thread

  mutable std::mutex mutex_;  // guards all members below
  int64_t count_ = 0;
  std::deque<Collective> pending_;
  std::string last_ = "none";  // the last begun collective's description
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  std::deque<Record> records_;  // consecutive numbers
  std::string records_path_;
  std::vector<std::unique_ptr<Event>> free_events_;
  std::vector<Peer> peers_;
  std::vector<std::function<std::string()>> health_checks_;
  std::string name_;
  std::function<std::string()> advice_;
  bool stop_ = false;
  std::thread thread_;  // declared last, since it uses the members above
};

}  // namespace triad
