// AttentionRun: a `triad bench attention` problem in device memory, ready to be timed.
#pragma once
#include <algorithm>
#include <vector>

#include "tools/bench/attention_parts.h"

namespace triad {

// Device memory that a problem needs, in bytes, found by a dry run.
struct AttentionMemory {
  int64_t arena = 0;  // total arena size
  int64_t saved = 0, scratch_forward = 0, scratch_backward = 0;
  int64_t peak = 0;  // peak over forward and backward without q, k and v, as PyTorch's peak is counted

  int64_t scratch() const { return align_up(std::max(scratch_forward, scratch_backward)); }
};
AttentionMemory plan_attention(const AttentionProblem&, Device, DType);

// Fills the inputs that random_qkv() and trained_qkv() do not: weights, dout and document bounds. qkv: t.qkv's rows.
// stream: random stream, 3 or more.
void fill_attention(Context&, const AttentionTensors& t, const AttentionProblem&, const std::vector<std::byte>& qkv,
                    uint64_t stream);

class AttentionRun {
 public:
  // The problem must outlive the run.
  AttentionRun(const AttentionProblem&, const AttentionMemory&, const std::vector<std::byte>& qkv, Device, DType);
  AttentionRun(const AttentionRun&) = delete;

  Context& ctx() { return runtime_.ctx(); }
  const AttentionTensors& tensors() const { return tensors_; }
  const AttentionParts& parts() const { return parts_; }
  void all_parts() {
    for (const AttentionPart& part : parts_.all()) part.work(ctx());
  }

 private:
  Runtime runtime_;
  AttentionTensors tensors_;
  AttentionParts parts_;
};

}  // namespace triad
