// BucketTrace: for each gradient bucket of each step, when its collective started and ended on the comm stream, and a
// checksum of the summed gradients, which must be equal on all ranks. Enabled by log.diagnostics "buckets". The host
// does not wait: times and checksums are read with the step's results.
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/context.h"

namespace triad {

class BucketTrace {
 public:
  // shared: every rank holds all sums of a bucket (dist.zero 0), so take() compares their checksums. queued: maximum
  // number of steps between end() and take().
  BucketTrace(Context&, Arena&, Comm&, int64_t buckets, bool shared, size_t queued);

  // Call order in a step: begin, then for each bucket launch and finish (before and after its collective, on the comm
  // stream), then end. sums: the bucket's summed gradients that this rank holds.
  void begin(const Stream& compute);
  void launch(int64_t bucket);
  void finish(Context& comm_ctx, int64_t bucket, ConstTensor sums);
  void end(Context& comm_ctx);

  struct Bucket {
    double launch_ms = 0, finish_ms = 0;  // since the beginning of the step's last micro-step
    int64_t elements = 0;
    int64_t checksum = 0;
  };
  struct Step {
    std::vector<Bucket> buckets;
    struct Odd {
      int64_t bucket;
      std::string ranks;  // odd_ranks()
    };
    std::vector<Odd> odd;  // buckets whose checksums differ between ranks
  };
  // Returns the oldest step that was not taken yet. Collective.
  Step take();

  // Rows of kHeader's columns, each with a newline.
  static std::string rows(int64_t step, const Step&);
  // The rows up to `step` in a file that starts with `beginning`. Empty for any other file: it has different buckets.
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

// Names the ranks whose values differ from the majority's; "" if all are equal. Without a majority, names all ranks.
std::string odd_ranks(const std::vector<int64_t>& by_rank);

}  // namespace triad
