#include "train/checkpoint/rank_work.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>

#include "engine/check.h"

namespace triad {

void run_on_ranks(Comm& comm, bool chosen, const std::function<void()>& work, const std::string& what) {
  if (comm.world() == 1) return chosen ? work() : void();
  std::exception_ptr error;  // error in this rank's work; read once that has ended
  std::future<void> working;
  if (chosen)
    working = std::async(std::launch::async, [&] {
      try {
        work();
      } catch (...) { error = std::current_exception(); }
    });
  for (;;) {
    WorkState own = WorkState::done;
    if (working.valid()) {
      const bool ended = working.wait_for(std::chrono::seconds(1)) == std::future_status::ready;
      own = !ended ? WorkState::busy : error != nullptr ? WorkState::failed : WorkState::done;
    }
    const std::vector<WorkState> all = comm.all_gather_host(own, what);
    if (std::count(all.begin(), all.end(), WorkState::busy) > 0) continue;
    if (error != nullptr) std::rethrow_exception(error);
    const auto failed = std::find(all.begin(), all.end(), WorkState::failed);
    if (failed != all.end()) fail("{} failed on rank {}", what, failed - all.begin());
    return;
  }
}

}  // namespace triad
