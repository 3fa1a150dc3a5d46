// The end of a process that cannot go on, and tells why first: a pipe that nobody empties, or a disk that hangs, may
// keep the one who tells for good.
#pragma once

namespace triad {

// Ends this process with exit code 1 after that time, whatever its threads wait for. False: there is no thread for it.
bool end_process_within(double seconds);

}  // namespace triad
