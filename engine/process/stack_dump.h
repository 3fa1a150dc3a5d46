// Stack traces of all this process's threads as text, while the threads run. A signal makes each thread record its
// return addresses; afterwards they are resolved to names.
#pragma once
#include <string>

namespace triad {

// Installs the handler for signal SIGRTMIN + 3. Must be called once, on any thread, before dump_stacks().
void prepare_stack_dumps();
// Returns one section for each thread, the caller's included. A thread that does not respond within a second, for
// example in a system call, is listed with the kernel function in which it waits and the system call. Concurrent calls
// run one after the other.
std::string dump_stacks();

}  // namespace triad
