// SIGUSR1 requests this process's stack dump (train/monitor/watchdog.h writes it). The handler is installed at process
// start and keeps a request until take_dump_request() is called; a process without a watchdog ignores it.
#pragma once

namespace triad {

void keep_dump_requests();          // installs the handler; the signal's default action would end the process
void wake_on_dump_request(int fd);  // each later request writes to this eventfd; -1: none
bool take_dump_request();           // whether a request has come since the last call

}  // namespace triad
