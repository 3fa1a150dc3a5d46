// SIGTERM and SIGINT request a checkpoint and an orderly stop at the end of the current step. A second SIGINT (Ctrl-C)
// ends the process immediately. A second SIGTERM does so only after a SIGINT in between, because launchers often send
// SIGTERM to the process and again to its group.
#pragma once
#include <cstdint>

namespace triad {

// Installs the handlers. acknowledge: this process acknowledges a signal on stderr immediately; set it on one rank
// only.
void await_stop_signals(bool acknowledge);
int stop_signal();               // the last signal received; 0: none
void step_begins(int64_t step);  // the step that the acknowledgement names

}  // namespace triad
