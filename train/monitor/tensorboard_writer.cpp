#include "train/monitor/tensorboard_writer.h"

#include <algorithm>
#include <cmath>

#include "engine/backend.h"
#include "engine/units.h"
#include "train/config/load_config.h"

namespace triad {

namespace {

// The run's hyperparameters: every scalar config key except in the groups log and dist, which don't affect what the run
// learns.
std::vector<tensorboard::HParam> hparams_of(const Json& config) {
  std::vector<tensorboard::HParam> all;
  for (const auto& [group, fields] : config.items()) {
    if (group == "log" || group == "dist") continue;
    for (const auto& [key, value] : fields.items()) {
      const std::string name = group + "." + key;
      if (value.is_boolean()) all.emplace_back(name, value.get<bool>());
      if (value.is_number()) all.emplace_back(name, value.get<double>());
      if (value.is_string()) all.emplace_back(name, value.get<std::string>());
    }
  }
  return all;
}

}  // namespace

std::string as_code(const std::string& text) {
  std::string out = "    ";
  for (const char c : text) out += c == '\n' ? "\n    " : std::string(1, c);
  return out;
}

TensorBoardWriter::TensorBoardWriter(const std::string& folder, const Arena& arena, const Config& config,
                                     int64_t resume_step)
    : arena_(arena), file_(folder, resume_step) {
  const Json json = config_to_json(config);
  file_.add_text(std::max<int64_t>(0, resume_step), "config", as_code(dump_json(json, 2)));
  file_.add_session_start(hparams_of(json));
}

void TensorBoardWriter::step(double loss, double grad_norm) {
  losses_.push_back(loss);
  grad_norms_.push_back(grad_norm);
}

void TensorBoardWriter::row(int64_t step, int64_t tokens, const Row& r) {
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / kMiB; };
  std::vector<Scalar> scalars = {{"train/loss", r.loss},
                                 {"train/lr", r.lr},
                                 {"train/norm", r.grad_norm},
                                 {"train/tokens", static_cast<double>(tokens)},
                                 {"train/tokens_per_s", r.tokens_per_s},
                                 {"train/step_ms", r.step_ms},
                                 {"watch_memory/tensors_mib", mib(arena_.used_bytes())},
                                 {"watch_memory/reserved_mib", mib(arena_.capacity_bytes())},
                                 {"watch_memory/in_use_mib", mib(backend::bytes_in_use(arena_.device()))}};
  if (r.mfu > 0) scalars.push_back({"train/mfu", r.mfu});
  if (r.comm_ms > 0) scalars.push_back({"train/step_wait_ms", r.comm_ms});
  file_.add(step, scalars);
  file_.add(step, "train/steps_loss", losses_);
  file_.add(step, "train/steps_norm", grad_norms_);
  losses_.clear();
  grad_norms_.clear();
}

void TensorBoardWriter::evaluation(int64_t step, double loss, double bits_per_byte) {
  std::vector<Scalar> scalars = {{"val/loss", loss}, {"val/perplexity", std::exp(loss)}};
  if (std::isfinite(bits_per_byte)) scalars.push_back({"val/bits_per_byte", bits_per_byte});
  file_.add(step, scalars);
}

void TensorBoardWriter::done() { file_.add_session_end(); }

}  // namespace triad
