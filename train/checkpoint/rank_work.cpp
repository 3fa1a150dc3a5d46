#include "train/checkpoint/rank_work.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <optional>
#include <vector>

namespace triad {

namespace {

// The message of the exception that work() throws; nullopt if it throws none.
std::optional<std::string> error_of(const std::function<void()>& work) {
  try {
    work();
    return std::nullopt;
  } catch (const std::exception& e) { return e.what(); }
}

WorkState state_of(const std::optional<std::string>& error) { return error ? WorkState::failed : WorkState::done; }

// Throws FailedTogether if any of the ranks' work has failed. error: of this rank's work.
void require_success(const std::vector<WorkState>& all, const std::optional<std::string>& error,
                     const std::string& what) {
  const auto failed = std::find(all.begin(), all.end(), WorkState::failed);
  if (failed == all.end()) return;
  throw FailedTogether(error ? *error : fmt::format("{} failed on rank {}", what, failed - all.begin()));
}

}  // namespace

void run_on_ranks(Comm& comm, bool chosen, const std::function<void()>& work, const std::string& what) {
  if (comm.world() == 1) return chosen ? work() : void();
  std::optional<std::string> error;  // of this rank's work; read once that has ended
  std::future<void> working;
  if (chosen) working = std::async(std::launch::async, [&] { error = error_of(work); });
  for (;;) {
    WorkState own = WorkState::done;
    if (working.valid()) {
      const bool ended = working.wait_for(std::chrono::seconds(1)) == std::future_status::ready;
      own = ended ? state_of(error) : WorkState::busy;
    }
    const std::vector<WorkState> all = comm.all_gather_host(own, what);
    if (std::count(all.begin(), all.end(), WorkState::busy) == 0) return require_success(all, error, what);
  }
}

void run_on_all_ranks(Comm& comm, const std::function<void()>& work, const std::string& what) {
  if (comm.world() == 1) return work();
  const std::optional<std::string> error = error_of(work);
  require_success(comm.all_gather_host(state_of(error), what), error, what);
}

}  // namespace triad
