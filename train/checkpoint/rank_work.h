// Runs slow work, such as writing files, on some ranks while the others wait.
#pragma once
#include <functional>
#include <string>

#include "engine/comm/comm.h"

namespace triad {

enum class WorkState : char { done, busy, failed };

// Runs work() on the ranks that are `chosen`, in a thread if there are several ranks. The ranks exchange their progress
// every second; without that, those that wait would count as hung. Throws this rank's error; on other ranks, an Error
// that names the rank whose work failed. Collective: all ranks call it. what: names the work in messages.
void run_on_ranks(Comm&, bool chosen, const std::function<void()>& work, const std::string& what);

}  // namespace triad
