// The environment variables that users of NSA trainers know (SPEC.md section 2): each maps onto a config key.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "train/load_config.h"

extern char** environ;

namespace triad {

namespace {

enum class Effect {
  value,         // the variable's text, with `word` behind it, becomes the key's value
  word,          // 1: the key becomes `word`; 0: no effect
  flag,          // 1: the key becomes true, 0: false
  negated_flag,  // 1: the key becomes false
  minutes,       // a number of them: the key is in seconds
  backend,       // PyTorch's name for one: nccl or gloo
  none,          // accepted: what it asks for is always so
  not_built,     // known, but its key does not exist yet
};
struct Variable {
  std::string_view name;
  Effect effect;
  std::string_view key, word = {};
};
constexpr Variable kVariables[] = {
    {"NSA_SEQ_LEN", Effect::value, "train.seq_len"},
    {"NSA_BATCH_SIZE", Effect::value, "train.micro_batch_size"},
    {"NSA_ACCUM", Effect::value, "train.accumulate_grad_batches"},
    {"NSA_LR", Effect::value, "train.lr"},
    {"NSA_FORCE_BRANCH", Effect::value, "nsa.force_branch"},
    {"NSA_FORCE_UNIFORM_GATE", Effect::flag, "nsa.uniform_gate"},
    {"NSA_STOPGRAD_GATES", Effect::flag, "nsa.stopgrad_gates"},
    {"NSA_HEARTBEAT_EVERY", Effect::value, "log.heartbeat_every"},
    {"NSA_DISABLE_CSV_LOGS", Effect::negated_flag, "log.csv"},
    {"NSA_PREFILL_BATCHED", Effect::none, ""},
    {"NSA_ENV_STATIC", Effect::none, ""},
    {"NSA_GC_RANGE", Effect::value, "runtime.recompute", "=block"},
    {"NSA_NO_GC", Effect::word, "runtime.recompute", "none"},
    {"NSA_MEM_DUMP_EVERY", Effect::value, "log.memory_every"},
    {"NSA_TB_DISABLE", Effect::not_built, "log.tensorboard"},
    {"NSA_DISABLE_AUX_STATS", Effect::not_built, "log.stats"},
    {"NSA_LOG_GRAD_NORM", Effect::not_built, "log.diagnostics"},
    {"NSA_TRACE_GRADS", Effect::not_built, "log.diagnostics"},
    {"NSA_TRACE_MODULE_BWD", Effect::not_built, "log.diagnostics"},
    {"NSA_TRACE_DDP_BUCKETS", Effect::not_built, "log.diagnostics"},
    {"NSA_STRICT_ASSERTS", Effect::not_built, "runtime.asserts"},
    {"NSA_DDP_BUCKET_MB", Effect::value, "dist.bucket_mb"},
    {"NSA_PG_TIMEOUT_MIN", Effect::minutes, "dist.timeout_s"},
    {"TORCH_BACKEND", Effect::backend, "dist.backend"},
    {"NSA_DDP_STATIC_GRAPH", Effect::flag, "runtime.cuda_graph"},
    {"NSA_USE_FA2", Effect::not_built, "runtime.kernels"},
    {"NSA_SDPA_NO_FLASH", Effect::not_built, "runtime.kernels"},
    {"NSA_SDPA_FLASH_ONLY", Effect::not_built, "runtime.kernels"},
};

bool read_flag(std::string_view name, std::string_view value) {
  if (value == "1" || value == "true") return true;
  if (value == "0" || value == "false") return false;
  fail_usage("environment variable {} is \"{}\": 0 or 1 is allowed", name, value);
}

int64_t read_minutes(std::string_view name, std::string_view value) {
  double minutes = 0;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, minutes);
  constexpr double kMost = 1 << 14;
  if (error != std::errc() || stop != end || !(minutes > 0 && minutes <= kMost))
    fail_usage("environment variable {} is \"{}\": minutes, a number in (0, {}], are needed", name, value, kMost);
  return std::max<int64_t>(1, std::llround(minutes * 60));
}

std::string_view read_backend(std::string_view name, std::string_view value) {
  if (value == "nccl") return "nccl";
  if (value == "gloo" || value == "mpi") return "mpi";
  fail_usage("environment variable {} is \"{}\": nccl or gloo is allowed", name, value);
}

}  // namespace

std::vector<std::string> apply_environment(Json& root, std::string_view only_group) {
  std::vector<std::string> honoured;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals), value = text.substr(equals + 1);
    const Variable* variable = nullptr;
    for (const Variable& v : kVariables)
      if (v.name == name) variable = &v;
    if (variable == nullptr) {
      if (name.starts_with("NSA_")) fail_usage("unknown environment variable {} (value \"{}\")", name, value);
      continue;
    }
    if (variable->effect == Effect::not_built)
      fail_usage("environment variable {} (value \"{}\"): its key {} is not built yet", name, value, variable->key);
    if (!only_group.empty() && variable->key.substr(0, variable->key.find('.')) != only_group) continue;
    switch (variable->effect) {
      case Effect::value:
        set_json_key(root, fmt::format("{}={}{}", variable->key, value, variable->word));
        break;
      case Effect::word:
        if (!read_flag(name, value)) continue;
        set_json_key(root, fmt::format("{}={}", variable->key, variable->word));
        break;
      case Effect::flag:
        set_json_key(root, fmt::format("{}={}", variable->key, read_flag(name, value)));
        break;
      case Effect::negated_flag:
        set_json_key(root, fmt::format("{}={}", variable->key, !read_flag(name, value)));
        break;
      case Effect::minutes:
        set_json_key(root, fmt::format("{}={}", variable->key, read_minutes(name, value)));
        break;
      case Effect::backend:
        set_json_key(root, fmt::format("{}={}", variable->key, read_backend(name, value)));
        break;
      case Effect::none:
      case Effect::not_built:
        break;
    }
    honoured.push_back(variable->key.empty() ? fmt::format("{}={}: no effect, always so", name, value)
                                             : fmt::format("{}={} -> {}", name, value, variable->key));
  }
  return honoured;
}

void check_environment() {
  Json ignored = Json::object();
  apply_environment(ignored);
}

}  // namespace triad
