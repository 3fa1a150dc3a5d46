// SIGUSR1 requests a stack dump (train/monitor/watchdog.h). The signal is handled from the start of the process, and a
// request is kept until a watchdog takes it; a process without a watchdog ignores it.
#pragma once

namespace triad {

void keep_dump_requests();          // installs the handler; the signal's default would end the process
void wake_on_dump_request(int fd);  // an eventfd that each later request writes to; -1: none
bool take_dump_request();           // true if there was a request since the last call

}  // namespace triad
