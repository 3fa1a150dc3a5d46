// A time limit for ending a process. A process that logs why it ends may block forever in that log, because of a pipe
// without a reader or a disk that hangs.
#pragma once

namespace triad {

// Ends this process with exit code 1 after `seconds`, even if all its threads block. False if no thread could be
// started for this.
bool end_process_within(double seconds);

}  // namespace triad
