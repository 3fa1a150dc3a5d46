// Runs slow work, such as writing files, on some ranks while the others wait.
#pragma once
#include <functional>
#include <string>

#include "engine/check.h"
#include "engine/comm/comm.h"

namespace triad {

enum class WorkState : char { done, busy, failed };

// The work of one rank or more has failed, and all ranks have learned of it: they throw this together, so that they can
// still call collectives.
class FailedTogether : public Error {
 public:
  using Error::Error;
};

// Runs work() on the ranks that are `chosen`, in a thread if there are several ranks. The ranks exchange their progress
// every second; without that, those that wait would count as hung. If work() throws on any rank, all throw
// FailedTogether, with the message of their own error or else the failed rank's number. (A single rank throws the error
// of its work.) Collective: all ranks call it. what: names the work in messages.
void run_on_ranks(Comm&, bool chosen, const std::function<void()>& work, const std::string& what);
// The same for short work on all ranks, in the calling thread.
void run_on_all_ranks(Comm&, const std::function<void()>& work, const std::string& what);

}  // namespace triad
