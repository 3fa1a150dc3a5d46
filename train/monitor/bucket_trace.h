// What became of each bucket of gradients, step by step: when its collective started and ended on the comm stream, and
// a checksum of the sums, which has to be the same on every rank. Diagnosis "buckets" (log.diagnostics) turns it on; a
// step does not wait for it: times and checksums are read with the step's other results.
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/context.h"

namespace triad {

class BucketTrace {
 public:
  // shared: every rank holds all of a bucket's sums (dist.zero 0), so that they are compared. queued: steps whose
  // results nobody has asked for yet, at most.
  BucketTrace(Context&, Arena&, Comm&, int64_t buckets, bool shared, size_t queued);

  // In this order, of each step: begin, then of each bucket launch and finish (around its collective, on the comm
  // stream), then end. sums: what this rank holds of them.
  void begin(const Stream& compute);
  void launch(int64_t bucket);
  void finish(Context& comm_ctx, int64_t bucket, ConstTensor sums);
  void end(Context& comm_ctx);

  struct Bucket {
    double launch_ms = 0, finish_ms = 0;  // since the last micro-step began
    int64_t elements = 0;
    int64_t checksum = 0;
  };
  struct Step {
    std::vector<Bucket> buckets;
    struct Odd {
      int64_t bucket;
      std::string ranks;  // odd_ranks()
    };
    std::vector<Odd> odd;  // buckets whose sums the ranks do not agree on
  };
  // Of the oldest step not yet taken. All ranks call it at the same point.
  Step take();

  // "step,bucket,elements,launch_ms,finish_ms,checksum" rows, each with its newline.
  static std::string rows(int64_t step, const Step&);
  // The rows of steps up to `step` in a file that begins with this text; none of a file that begins otherwise, whose
  // buckets are not these.
  static std::string rows_until(int64_t step, std::string_view beginning, std::string_view file);
  static constexpr const char* kHeader = "step,bucket,elements,launch_ms,finish_ms,checksum\n";

 private:
  struct Timed {
    explicit Timed(Device device) : launch(device, true), finish(device, true) {}
    Event launch, finish;
    int64_t elements = 0;
  };
  struct Slot {
    Slot(Device device, int64_t buckets);
    Event began, done;
    std::deque<Timed> buckets;
    PinnedMemory checksums;
  };
  void compare(Step&);

  Comm& comm_;
  bool shared_;
  Tensor checksums_;  // [queued, buckets] i64
  std::deque<Slot> slots_;
  size_t next_ = 0, oldest_ = 0, waiting_ = 0;
};

// Which ranks' values differ from those of most: "" if none do. With two, or a tie, all are named.
std::string odd_ranks(const std::vector<int64_t>& by_rank);

}  // namespace triad
