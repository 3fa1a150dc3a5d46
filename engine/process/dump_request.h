// SIGUSR1 asks a run for a stack dump (train/monitor/watchdog.h). A request is kept from the process's first
// instructions on until a watchdog answers it; a process that never has one ignores it.
#pragma once

namespace triad {

void keep_dump_requests();          // replaces the signal's default action, which ends the process
void wake_on_dump_request(int fd);  // an eventfd that is written to at each request from now on; -1: none
bool take_dump_request();           // true: there was one since the last call, or since the process's start

}  // namespace triad
