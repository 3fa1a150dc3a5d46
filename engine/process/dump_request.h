// SIGUSR1 requests a stack dump of this process (train/monitor/watchdog.h writes it). The handler is installed at the
// start of the process and keeps a request until take_dump_request() is called; a process without a watchdog ignores
// it.
#pragma once

namespace triad {

void keep_dump_requests();          // installs the handler; the signal's default action would end the process
void wake_on_dump_request(int fd);  // each later request writes to this eventfd; -1: to none
bool take_dump_request();           // whether there was a request since the last call

}  // namespace triad
