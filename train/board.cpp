#include "train/board.h"

#include <cmath>

#include "engine/backend.h"

namespace triad {

namespace {
constexpr double kMiB = 1024.0 * 1024.0;
}

void Board::step(double loss, double grad_norm) {
  losses_.push_back(loss);
  grad_norms_.push_back(grad_norm);
}

void Board::row(int64_t step, const Row& r) {
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / kMiB; };
  std::vector<Scalar> scalars = {{"loss", r.loss},
                                 {"lr", r.lr},
                                 {"tokens_per_s", r.tokens_per_s},
                                 {"grad_norm", r.grad_norm},
                                 {"step_ms", r.step_ms},
                                 {"memory/tensors_mib", mib(arena_.used_bytes())},
                                 {"memory/reserved_mib", mib(arena_.capacity_bytes())},
                                 {"memory/in_use_mib", mib(backend::bytes_in_use(arena_.device()))}};
  if (r.mfu > 0) scalars.push_back({"mfu", r.mfu});
  if (r.comm_ms > 0) scalars.push_back({"comm_wait_ms", r.comm_ms});
  file_.add(step, scalars);
  file_.add(step, "steps/loss", losses_);
  file_.add(step, "steps/grad_norm", grad_norms_);
  losses_.clear();
  grad_norms_.clear();
}

void Board::evaluation(int64_t step, double loss) {
  const std::vector<Scalar> scalars = {{"val_loss", loss}, {"ppl", std::exp(loss)}};
  file_.add(step, scalars);
}

}  // namespace triad
