// Stack traces of all threads of this process, as text, taken while the threads run: a signal makes each thread record
// its return addresses, which are resolved to names afterwards.
#pragma once
#include <string>

namespace triad {

// Installs the handler of the third real-time signal. Call it once, on any thread, before dump_stacks().
void prepare_stack_dumps();
// One section for each thread, the caller's included. A thread that does not respond within a second, for example in a
// system call, is listed with the kernel's wait channel and system call. Concurrent calls run one after the other.
std::string dump_stacks();

}  // namespace triad
