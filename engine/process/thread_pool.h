// The threads that CPU loops are split over. They sleep while there is nothing to do (with OMP_WAIT_POLICY=active they
// poll for some milliseconds first), so a machine that also does other work loses nothing to them.
// The calling thread works too and never waits for a helper that has not begun: a helper that the system runs late only
// finds less work. How many helpers a loop wakes follows from the time that its iterations took so far: loops of some
// microseconds run on the calling thread alone, whatever the number of cores.
#pragma once
#include <atomic>
#include <cstdint>

namespace triad {

// What one iteration of a loop in the source took last time; each loop keeps one in static memory.
struct LoopCost {
  std::atomic<double> ns_per_iteration{0};
};

// Calls piece(body, begin, end) for disjoint pieces that cover [0, n), on at most `threads` threads, and returns when
// all have ended. The first exception of a piece is thrown again here, once no piece runs any more. A loop inside a
// loop, and a loop while another thread's loop is running, are run by the caller alone.
using LoopPiece = void (*)(const void* body, int64_t begin, int64_t end);
void run_loop(int64_t n, int threads, LoopCost& cost, LoopPiece piece, const void* body);

}  // namespace triad
