// The threads that CPU loops are split over. Idle threads sleep and so take no CPU time from other programs (with
// OMP_WAIT_POLICY=active they first poll for some milliseconds). The calling thread works too and never waits for a
// helper that has not started, so a helper that the system schedules late only finds less work. How many helpers it
// wakes follows from the loop's measured time per iteration: short loops run on the calling thread alone, however many
// cores there are.
#pragma once
#include <atomic>
#include <cstdint>

namespace triad {

// The measured time per iteration. Each loop in the source has one in static memory.
struct LoopCost {
  std::atomic<double> ns_per_iteration{0};
};

// Calls piece(body, begin, end) for disjoint ranges that cover [0, n), on at most `threads` threads, and returns when
// all calls have ended. Then rethrows the first exception from a call. A loop inside a loop, and a loop that starts
// while another thread's loop is running, run on the calling thread alone.
using LoopPiece = void (*)(const void* body, int64_t begin, int64_t end);
void run_loop(int64_t n, int threads, LoopCost& cost, LoopPiece piece, const void* body);

}  // namespace triad
