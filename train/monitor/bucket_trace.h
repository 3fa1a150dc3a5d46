// BucketTrace: records for each step's gradient buckets when the collective started and ended on the comm stream, and a
// checksum over the summed gradients, which must be equal on all ranks. Enabled by log.diagnostics "buckets". The host
// does not wait: times and checksums are read together with the step's results.
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/context.h"

namespace triad {

class BucketTrace {
 public:
  // shared: true if every rank holds all of a bucket's sums (dist.zero 0), so take() compares checksums between ranks.
  // queued: most steps between end() and take().
  BucketTrace(Context&, Arena&, Comm&, int64_t buckets, bool shared, size_t queued);

  // Call order in a step: begin; then for each bucket launch before its collective and finish after it, both on the
  // comm stream; then end. sums: this rank's part of the bucket's summed gradients.
  void begin(const Stream& compute);
  void launch(int64_t bucket);
  void finish(Context& comm_ctx, int64_t bucket, ConstTensor sums);
  void end(Context& comm_ctx);

  struct Bucket {
    // When the collective starts and ends, since the step's last micro-step started.
    double launch_ms = 0, finish_ms = 0;
    int64_t elements = 0;
    int64_t checksum = 0;
  };
  struct Step {
    std::vector<Bucket> buckets;
    struct Odd {
      int64_t bucket;
      std::string ranks;  // the text that odd_ranks() returns
    };
    std::vector<Odd> odd;  // the buckets whose checksums differ between ranks
  };
  // Returns the oldest step's trace that take() has not returned yet. Collective: all ranks call it.
  Step take();

  // A step's rows for ddp_buckets.txt in kHeader's columns, each with a newline.
  static std::string rows(int64_t step, const Step&);
  // Rows for steps up to `step` from a file that starts with `beginning`. Empty if the file starts otherwise, because
  // it is then about different buckets.
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
  Tensor checksums_;  // [queued, buckets] i64: checksums by queued step
  std::deque<Slot> slots_;
  size_t next_ = 0, oldest_ = 0, waiting_ = 0;
};

// A text that names the ranks whose values differ from the majority's, or all ranks if there is no majority; "" if all
// values are equal.
std::string odd_ranks(const std::vector<int64_t>& by_rank);

}  // namespace triad
