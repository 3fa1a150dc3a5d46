// The stacks of all threads of this process, as text, taken while they run on: each thread is asked by a signal to note
// its own return addresses, which are named afterwards.
#pragma once
#include <string>

namespace triad {

// To be called once, on any thread, before stacks are asked for: takes the signal (the third of the real-time ones).
void prepare_stack_dumps();
// One section a thread, the caller's included. A thread that does not answer within a second, one in the kernel say, is
// named with what the kernel tells of it. One caller at a time.
std::string dump_stacks();

}  // namespace triad
