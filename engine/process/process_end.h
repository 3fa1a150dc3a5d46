// A time limit for the end of a process that first logs why it ends: a pipe without a reader or a hanging disk may
// block the logging forever.
#pragma once

namespace triad {

// Ends this process with exit code 1 after that time, even if all its threads block. False if no thread could be
// started.
bool end_process_within(double seconds);

}  // namespace triad
