#include "train/monitor/run_tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace triad {

RunTables::RunTables(const RunFolder& folder, int64_t resume_step)
    : training_(folder.file("training.csv"), "step,loss,lr,tokens_per_s,grad_norm,step_ms,mfu", resume_step),
      validation_(folder.file("val.csv"), "step,val_loss,ppl", resume_step),
      fallbacks_(folder.file("fallback_counters.csv"), "step,layer,branch,kernel,reason,count", resume_step) {}

void RunTables::step(const StepRecord& s) {
  if (!s.row) return;
  training_.row(fmt::format("{},{:.6f},{:.6e},{:.1f},{:.6f},{:.3f},{}", s.step, s.loss, s.lr, s.tokens_per_s,
                            s.grad_norm, s.median_ms, s.mfu > 0 ? fmt::format("{:.4f}", s.mfu) : ""));
}

void RunTables::evaluation(int64_t step, double loss) {
  validation_.row(fmt::format("{},{:.6f},{:.4f}", step, loss, std::exp(loss)));
}

void RunTables::fallbacks(int64_t step, const Routes& routes) {
  fallbacks_written_.resize(routes.counts().size(), 0);
  for (size_t i = 0; i < fallbacks_written_.size(); ++i) {
    const Routes::Count& c = routes.counts()[i];
    const int64_t fresh = c.calls - std::exchange(fallbacks_written_[i], c.calls);
    if (!c.is_fallback() || fresh == 0) continue;
    std::string reason = c.reason;  // commas in it are replaced, because a comma would begin a new column
    std::replace(reason.begin(), reason.end(), ',', ';');
    fallbacks_.row(
        fmt::format("{},{},{},{},{},{}", step, c.layer, branch_of(c.op), c.op + " " + c.kernel, reason, fresh));
  }
}

}  // namespace triad
