#include "engine/process/thread_pool.h"

#include <strings.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace triad {

namespace {

using Clock = std::chrono::steady_clock;

double ns_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

// Nanoseconds of work that justify one more thread: several times the cost to wake it.
constexpr double kGrainNs = 25'000;

thread_local bool in_loop = false;  // whether this thread is inside a loop
class InLoop {
 public:
  InLoop() { in_loop = true; }
  ~InLoop() { in_loop = before_; }
  InLoop(const InLoop&) = delete;

 private:
  const bool before_ = in_loop;
};

// Runs one loop at a time. mutex_ protects the members except claim_ and the atomic ones.
class ThreadPool {
 public:
  static ThreadPool& get() {
    static ThreadPool& pool = *new ThreadPool;  // never destroyed, since threads may sleep in it until the process ends
    return pool;
  }

  // Takes the lock that a loop holds while it runs. The returned lock is not owned if another thread's loop runs.
  std::unique_lock<std::mutex> try_claim() { return std::unique_lock(claim_, std::try_to_lock); }

  struct Loop {
    int64_t n, chunk;
    LoopPiece piece;
    const void* body;
  };
  // Runs the iterations [first, loop.n) on this thread and `helpers` others. Returns how many this thread ran.
  int64_t run(const Loop& loop, int64_t first, int helpers) {
    next_.store(first, std::memory_order_relaxed);
    {
      const std::lock_guard lock(mutex_);
      start_threads(helpers);
      loop_ = loop;
      error_ = nullptr;
      wanted_.store(std::min(helpers, threads_), std::memory_order_relaxed);
    }
    work_.notify_one();
    const int64_t mine = take_chunks(loop);
    std::unique_lock lock(mutex_);
    wanted_.store(0, std::memory_order_relaxed);  // a helper that starts now would find no work
    done_.wait(lock, [&] { return active_ == 0; });
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
    return mine;
  }

 private:
  int64_t take_chunks(const Loop& loop) {
    int64_t mine = 0;
    const InLoop in;
    try {
      for (;;) {
        const int64_t begin = next_.fetch_add(loop.chunk, std::memory_order_relaxed);
        if (begin >= loop.n) break;
        const int64_t end = std::min(begin + loop.chunk, loop.n);
        loop.piece(loop.body, begin, end);
        mine += end - begin;
      }
    } catch (...) {
      next_.store(loop.n,
                  std::memory_order_relaxed);  // stops the loop: the other threads finish only their current chunks
      const std::lock_guard lock(mutex_);
      if (error_ == nullptr) error_ = std::current_exception();
    }
    return mine;
  }

  void start_threads(int helpers) {
    for (; threads_ < helpers; ++threads_) {
      try {
        std::thread([this] { help(); }).detach();
      } catch (const std::system_error&) {
        return;
      }  // the system allows no further thread, so the loop runs with fewer
    }
  }

  [[noreturn]] void help() {
    std::unique_lock lock(mutex_);
    for (;;) {
      poll(lock);
      work_.wait(lock, [&] { return wanted_.load(std::memory_order_relaxed) > 0; });
      ++active_;
      // Each helper wakes the next one, so the calling thread pays for one wake-up only.
      if (wanted_.fetch_sub(1, std::memory_order_relaxed) > 1) work_.notify_one();
      const Loop loop = loop_;
      lock.unlock();
      take_chunks(loop);
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  // With OMP_WAIT_POLICY=active, as in OpenMP, an idle thread polls for a while before it sleeps: it starts sooner but
  // occupies a core.
  void poll(std::unique_lock<std::mutex>& lock) {
    static const char* const policy = std::getenv("OMP_WAIT_POLICY");
    static const bool active = policy != nullptr && strcasecmp(policy, "active") == 0;
    if (!active) return;
    constexpr double kPollNs = 5e6;
    lock.unlock();
    const Clock::time_point begin = Clock::now();
    while (wanted_.load(std::memory_order_relaxed) == 0 && ns_since(begin) < kPollNs) std::this_thread::yield();
    lock.lock();
  }

  std::mutex claim_, mutex_;
  std::condition_variable work_, done_;
  Loop loop_{};
  std::atomic<int64_t> next_{0};  // first iteration that no thread has taken
  std::atomic<int> wanted_{0};    // helpers that may still join
  int active_ = 0;                // helpers that have joined and not finished
  int threads_ = 0;
  std::exception_ptr error_;
};

}  // namespace

void run_loop(int64_t n, int threads, LoopCost& cost, LoopPiece piece, const void* body) {
  if (n <= 0) return;
  if (threads <= 1 || n == 1 || in_loop) return piece(body, 0, n);
  const InLoop in;
  ThreadPool& pool = ThreadPool::get();
  const std::unique_lock<std::mutex> claim = pool.try_claim();
  if (!claim.owns_lock()) return piece(body, 0, n);

  constexpr int64_t kMostChunks = 512;
  const int64_t chunk = 1 + n / kMostChunks;
  const Clock::time_point begin = Clock::now();
  const auto helpers_for = [&](double ns) {
    const int64_t others = (n + chunk - 1) / chunk - 1;
    return static_cast<int>(std::min({static_cast<double>(threads - 1), static_cast<double>(others), ns / kGrainNs}));
  };
  // A loop that was short last time starts on this thread alone. It wakes helpers only if its first chunk takes longer
  // this time.
  double ns = cost.ns_per_iteration.load(std::memory_order_relaxed);
  int64_t done = 0;
  int helpers = helpers_for(ns * static_cast<double>(n));
  if (helpers == 0) {
    done = chunk;
    piece(body, 0, chunk);
    ns = ns_since(begin) / static_cast<double>(done);
    helpers = helpers_for(ns * static_cast<double>(n - done));
  }
  if (helpers > 0) {
    done += pool.run({n, chunk, piece, body}, done, helpers);
  } else {
    piece(body, done, n);
    done = n;
  }
  if (done > 0) cost.ns_per_iteration.store(ns_since(begin) / static_cast<double>(done), std::memory_order_relaxed);
}

}  // namespace triad
