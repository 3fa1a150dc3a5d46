// SIGTERM and SIGINT ask a run for a checkpoint and an orderly end, when its step ends. A second SIGINT (Ctrl-C) ends
// the process at once, whatever comes in between. A second SIGTERM does so only if a SIGINT came between the two:
// launchers often send it to the process and again to its group.
#pragma once
#include <cstdint>

namespace triad {

// From now on. tells: this process says on stderr, at once, that it was heard; of several ranks the first is enough.
void await_stop_signals(bool tells);
int stop_signal();               // the last of them; 0: none has come
void step_begins(int64_t step);  // for what is told

}  // namespace triad
