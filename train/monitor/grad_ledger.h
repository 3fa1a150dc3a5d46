// GradLedger: records for each parameter whether backward has reported its gradient (GradSink::ready). On request it
// computes on the device each gradient's norm and its non-finite element count, after the sums over ranks and before
// clipping.
#pragma once
#include <string>
#include <vector>

#include "model/grad_sink.h"
#include "model/params.h"
#include "train/step/flat_buffer.h"

namespace triad {

// Numbers about one step's gradients, on the host, indexed by parameter.
struct GradNorms {
  std::vector<double> norm;
  std::vector<int64_t> not_finite;  // NaN or infinite gradient elements
  bool is_zero(size_t i) const { return norm[i] == 0; }
};

class GradLedger final : public GradSink {
 public:
  // sums: the summed gradients; this rank has the given parts.
  GradLedger(Context&, Arena&, const Params&, Tensor sums, const Parts& parts);
  GradLedger(Context& ctx, Arena& arena, const Params& params)  // one rank has all
      : GradLedger(ctx, arena, params, params.grads(), Parts::whole(params)) {}

  // Call before queuing a backward. Each ready() call is forwarded to `next` unless it is null, and throws Error if the
  // gradient was reported before. A replayed graph does not call ready(), so what the recorded backward has reported
  // stays valid.
  void begin(GradSink* next) {
    next_ = next;
    arrivals_.begin();
  }
  void open(int64_t segment, const Stream& on) override {
    if (next_ != nullptr) next_->open(segment, on);
  }
  void ready(ConstTensor grad, const Stream& on) override;
  // Names of parameters whose gradients the last backward did not report.
  std::vector<std::string> missing() const { return arrivals_.missing(); }
  void require_all() const { arrivals_.require_all(); }  // throws MissingGradients

  // Queues computing norms() [parameters, ParamNorms::count] f64 from the current gradients. Each rank covers only its
  // own parts; the caller adds up the ranks' tensors.
  void measure(Context&);
  Tensor norms() const { return norms_; }
  GradNorms read(const double* norms) const;

 private:
  const Params& params_;
  GradArrivals arrivals_;
  GradSink* next_ = nullptr;
  Tensor sums_, pieces_, first_piece_, norms_;
};

// Whether the parameter's gradient must be zero: in a forced or detached gate; in a branch that is forced off or
// attends to no block; for keys where every query attends to at most one key; and for the gate's first matrix in the
// first update, because the second matrix is initialised to zero. step: updates since fresh weights, this one included.
bool expects_zero_gradient(const ModelConfig&, int64_t seq_len, int64_t step, const ParamSpec&);

}  // namespace triad
