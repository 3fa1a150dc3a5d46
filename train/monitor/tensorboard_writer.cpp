#include "train/monitor/tensorboard_writer.h"

#include <algorithm>
#include <cmath>

#include "engine/backend.h"
#include "train/config/load_config.h"

namespace triad {

namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// The folder for the event file whose axis is tokens. It's separate, because a resume discards a file's events by their
// position on its axis.
std::string by_tokens(const std::string& folder) { return folder + "/by_tokens"; }
int64_t tokens_or_none(int64_t resume_step, int64_t resume_tokens) { return resume_step >= 0 ? resume_tokens : -1; }

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

// Indents each line by four spaces, which Markdown shows as a code block.
std::string as_code(const std::string& text) {
  std::string out = "    ";
  for (const char c : text) out += c == '\n' ? "\n    " : std::string(1, c);
  return out;
}

}  // namespace

TensorBoardWriter::TensorBoardWriter(const std::string& folder, const Arena& arena, const Config& config,
                                     int64_t resume_step, int64_t resume_tokens)
    : arena_(arena),
      file_(folder, resume_step),
      by_tokens_(by_tokens(folder), tokens_or_none(resume_step, resume_tokens)) {
  const Json json = config_to_json(config);
  file_.add_text(std::max<int64_t>(0, resume_step), "config", as_code(dump_json(json, 2)));
  file_.add_session_start(hparams_of(json));
}

void TensorBoardWriter::rewind(const std::string& folder, int64_t resume_step, int64_t resume_tokens) {
  EventFile(folder, resume_step);
  EventFile(by_tokens(folder), tokens_or_none(resume_step, resume_tokens));
}

void TensorBoardWriter::step(double loss, double grad_norm) {
  losses_.push_back(loss);
  grad_norms_.push_back(grad_norm);
}

void TensorBoardWriter::row(int64_t step, int64_t tokens, const Row& r) {
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / kMiB; };
  std::vector<Scalar> scalars = {{"train/loss", r.loss},
                                 {"train/lr", r.lr},
                                 {"train/grad_norm", r.grad_norm},
                                 {"train/tokens", static_cast<double>(tokens)},
                                 {"perf/tokens_per_s", r.tokens_per_s},
                                 {"perf/step_ms", r.step_ms},
                                 {"memory/tensors_mib", mib(arena_.used_bytes())},
                                 {"memory/reserved_mib", mib(arena_.capacity_bytes())},
                                 {"memory/in_use_mib", mib(backend::bytes_in_use(arena_.device()))}};
  if (r.mfu > 0) scalars.push_back({"perf/mfu", r.mfu});
  if (r.comm_ms > 0) scalars.push_back({"perf/comm_wait_ms", r.comm_ms});
  file_.add(step, scalars);
  file_.add(step, "steps/loss", losses_);
  file_.add(step, "steps/grad_norm", grad_norms_);
  const std::vector<Scalar> by_tokens = {{"train/loss_by_tokens", r.loss}};
  by_tokens_.add(tokens, by_tokens);
  losses_.clear();
  grad_norms_.clear();
}

void TensorBoardWriter::evaluation(int64_t step, int64_t tokens, double loss) {
  const std::vector<Scalar> scalars = {{"val/loss", loss}, {"val/perplexity", std::exp(loss)}};
  file_.add(step, scalars);
  const std::vector<Scalar> by_tokens = {{"val/loss_by_tokens", loss}};
  by_tokens_.add(tokens, by_tokens);
}

void TensorBoardWriter::done() { file_.add_session_end(); }

}  // namespace triad
