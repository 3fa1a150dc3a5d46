// GradLedger: records for each parameter whether backward has announced its gradient, and on request computes each
// gradient's norm and count of non-finite elements on the device, after the sums over ranks and before clipping.
#pragma once
#include <string>
#include <vector>

#include "model/grad_sink.h"
#include "model/params.h"
#include "train/flat_buffer.h"

namespace triad {

// The gradients of one step, on the host, by parameter index.
struct GradNorms {
  std::vector<double> norm;
  std::vector<int64_t> not_finite;  // number of elements
  bool is_zero(size_t i) const { return norm[i] == 0; }
};

class GradLedger final : public GradSink {
 public:
  // own: the elements whose summed gradients this rank holds; empty: all.
  GradLedger(Context&, Arena&, const Params&, const std::vector<ElementRange>& own = {});

  // Call before queuing a backward. Forwards each announcement to `next` unless null. The replay of a recorded backward
  // announces nothing, so the recorded announcements stay valid.
  void begin(GradSink* next) {
    next_ = next;
    arrivals_.begin();
  }
  void ready(ConstTensor grad, const Stream& on) override;
  std::vector<std::string> missing() const { return arrivals_.missing(); }  // in the last backward
  void require_all() const { arrivals_.require_all(); }                     // throws MissingGradients

  // Queues the computation of norms() [parameters, ParamNorms::count] f64 from the current gradients. It covers only
  // the elements of `own`; the caller adds the ranks' tensors.
  void measure(Context&);
  Tensor norms() const { return norms_; }
  GradNorms read(const double* norms) const;

 private:
  const Params& params_;
  GradArrivals arrivals_;
  GradSink* next_ = nullptr;
  Tensor pieces_, first_piece_, norms_;
};

// Whether the parameter's gradient is zero by construction: a forced or detached gate; a branch that is forced off or
// attends to no block; keys where every query attends to at most one entry; and the gate's first matrix in the first
// update, because the second matrix is initialised to zero. step: updates since fresh weights, this one included.
bool expects_zero_gradient(const ModelConfig&, int64_t seq_len, int64_t step, const ParamSpec&);

}  // namespace triad
