// GradLedger: of each parameter's gradient whether backward told that it is there, and on steps that ask for it its
// norm and whether all of it is finite, taken on the device behind all sums over ranks and before clipping.
#pragma once
#include <string>
#include <vector>

#include "engine/check.h"
#include "model/grad_sink.h"
#include "model/params.h"
#include "train/grad_reducer.h"

namespace triad {

// Of one step, on the host, by parameter.
struct GradFacts {
  std::vector<double> norm;
  std::vector<int64_t> not_finite;  // elements
  bool is_zero(size_t i) const { return norm[i] == 0; }
};

// Gradients that a backward never told of.
class MissingGradients : public Error {
 public:
  MissingGradients(std::vector<std::string> names, int64_t of);
  std::vector<std::string> names;
  int64_t of;  // how many there should have been
};

class GradLedger final : public GradSink {
 public:
  // own: the elements whose sums this rank holds; empty: all.
  GradLedger(Context&, Arena&, const Params&, const std::vector<ElementRange>& own = {});

  // A backward is queued; `next` is told of each gradient too. (A backward that is replayed tells nobody: it is the one
  // that was recorded.)
  void begin(GradSink* next) {
    next_ = next;
    arrived_.assign(arrived_.size(), false);
  }
  void ready(ConstTensor grad, const Stream& on) override;
  std::vector<std::string> missing() const;  // of the last backward
  void require_all() const;                  // throws MissingGradients

  // Queues the facts of what the gradients hold now: [parameters, ParamNorms::count] f64. Of own elements alone where
  // not all are: the ranks' rows are then to be added.
  void measure(Context&);
  Tensor facts() const { return facts_; }
  GradFacts read(const double* facts) const;

 private:
  const Params& params_;
  std::vector<int64_t> by_offset_;  // parameters as they lie in the buffer
  std::vector<bool> arrived_;
  GradSink* next_ = nullptr;
  Tensor pieces_, first_piece_, facts_;
};

// Whether a gradient has to be zero: of a gate that takes none, of branches that are forced off or see no block, of
// keys where a query sees one entry at most, and of the gate's first matrix before the second, which begins at zero,
// has moved. step: optimizer steps that moved weights, and this one, from fresh weights.
bool expects_zero_gradient(const ModelConfig&, int64_t seq_len, int64_t step, const std::string& name);

}  // namespace triad
