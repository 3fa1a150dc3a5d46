// CommGuard: a thread of each rank that ends its process when the run cannot go on. It knows the collectives that are
// under way, on the host or on a stream, and the other ranks' processes on this host. A collective that does not finish
// within dist.timeout_s, or a rank that is gone before the end, is told on stderr with the collective's number, what it
// is of and its bytes; then the process exits with 1. Nothing gentler would do: the main thread may wait inside a
// library for a rank that never comes. The last 1,000 collectives are kept, and written to a file then; the end
// does not wait for that long.
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

  // From now on, until expect_end(), the end of one of these is the run's.
  void watch(const std::vector<LocalPeer>& peers);
  void expect_end();
  // Asked now and then: what is wrong with the library, or nothing.
  void ask(std::function<std::string()> what_is_wrong);

  // A collective begins: what it is ("all_reduce of bucket 3"), and its bytes on this rank. It is finished at end(), or
  // when a stream gets to where it is at end_on(). begin() returns it as messages have it.
  std::string begin(std::string what, int64_t bytes);
  void end();
  void end_on(const Stream&);
  int64_t count() const;  // collectives begun so far

  // The collective that all later ones wait for, or if none is under way the last one that was.
  struct Last {
    int64_t number = 0;
    std::string what = "none";
    bool under_way = false;
  };
  Last last() const;  // on a stream as of the last look, a fifth of a second ago at most
  // Where the last collectives go when this process has to end: a row each, with when it began and was seen finished.
  void record_to(std::string path);

 private:
  struct Collective {
    int64_t number = 0;
    std::string what;
    int64_t bytes = 0;
    double waited_s = 0;
    std::unique_ptr<Event> event;  // of one on a stream
    std::string str() const;
  };
  // A collective as it is remembered; seconds since the guard began, and negative: not finished as far as was seen.
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
  void look(double seconds);
  void retire_finished();
  double now_s() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count(); }
  void note_finished(int64_t number);
  void write_records(const std::string& why) const;
  std::string others() const;
  [[noreturn]] void end_process(const std::string& why) const;

  const int rank_;
  const double timeout_s_;
  const int wake_;  // an eventfd: the thread has something new to look at

  mutable std::mutex mutex_;  // of all that follows
  int64_t count_ = 0;
  std::deque<Collective> pending_;
  std::string last_ = "none";  // finished or not
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  std::deque<Record> records_;  // without gaps in their numbers
  std::string records_path_;
  std::vector<std::unique_ptr<Event>> free_events_;
  std::vector<Peer> peers_;
  std::function<std::string()> what_is_wrong_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace triad
