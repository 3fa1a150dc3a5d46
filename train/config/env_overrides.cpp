// Other NSA trainers' environment variables, which users may have set. Each sets the config key that has the same
// meaning.
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>

#include "engine/process/did_you_mean.h"
#include "train/config/load_config.h"

extern char** environ;

namespace triad {

namespace {

enum class Effect {
  value,         // the variable's text, followed by `word`, is the key's value
  word,          // "1" sets the key to `word`; "0" has no effect
  negated_word,  // "0" sets the key to `word`; "1" has no effect
  joins,         // "1" appends `word` to the key's list; "0" has no effect
  flag,          // "1" sets the key to true, "0" to false
  negated_flag,  // "1" sets the key to false
  minutes,       // the variable is in minutes, which are converted to seconds
  backend,       // the variable is PyTorch's backend name: nccl or gloo
  none,          // the variable is accepted without effect: Triad always behaves this way
};
struct Variable {
  std::string_view name;
  Effect effect;
  std::string_view key, word = {};
};
// All known variables. A variable that sets two keys has two rows.
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
    {"NSA_TB_DISABLE", Effect::negated_flag, "log.tensorboard"},
    {"NSA_DISABLE_AUX_STATS", Effect::negated_flag, "log.stats"},
    {"NSA_LOG_GRAD_NORM", Effect::joins, "log.diagnostics", "layer_norms"},
    {"NSA_TRACE_GRADS", Effect::joins, "log.diagnostics", "ledger"},
    {"NSA_TRACE_MODULE_BWD", Effect::joins, "log.diagnostics", "backward"},
    {"NSA_TRACE_DDP_BUCKETS", Effect::joins, "log.diagnostics", "buckets"},
    {"NSA_STRICT_ASSERTS", Effect::flag, "runtime.asserts"},
    {"NSA_DDP_BUCKET_MB", Effect::value, "dist.bucket_mb"},
    {"NSA_PG_TIMEOUT_MIN", Effect::minutes, "dist.timeout_s"},
    {"TORCH_BACKEND", Effect::backend, "dist.backend"},
    {"NSA_DDP_STATIC_GRAPH", Effect::flag, "runtime.cuda_graph"},
    {"NSA_USE_FA2", Effect::negated_word, "runtime.kernels", "general"},
    {"NSA_SDPA_NO_FLASH", Effect::word, "runtime.kernels", "general"},
    {"NSA_SDPA_FLASH_ONLY", Effect::word, "runtime.kernels", "fused"},
    {"NSA_SDPA_FLASH_ONLY", Effect::word, "runtime.strict", "true"},
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

// The value that the variable gives its key, as text for --set; nullopt if the variable has no effect.
std::optional<std::string> value_of(const Variable& variable, std::string_view value) {
  const auto flag = [&] { return read_flag(variable.name, value); };
  switch (variable.effect) {
    case Effect::value:
      return fmt::format("{}{}", value, variable.word);
    case Effect::word:
      return flag() ? std::optional(std::string(variable.word)) : std::nullopt;
    case Effect::negated_word:
      return flag() ? std::nullopt : std::optional(std::string(variable.word));
    case Effect::flag:
      return fmt::format("{}", flag());
    case Effect::negated_flag:
      return fmt::format("{}", !flag());
    case Effect::minutes:
      return fmt::format("{}", read_minutes(variable.name, value));
    case Effect::backend:
      return std::string(read_backend(variable.name, value));
    default:
      return std::nullopt;
  }
}

void join_list(Json& root, std::string_view key, std::string_view word) {
  const size_t dot = key.find('.');
  Json& group = root[std::string(key.substr(0, dot))];
  if (!group.is_null() && !group.is_object()) return;  // not an object: read_group() reports this error later
  Json& list = group[std::string(key.substr(dot + 1))];
  if (list.is_null()) list = Json::array();
  if (list.is_string()) list = Json::array({list});  // a string counts as a list with one element
  if (list.is_array() && std::find(list.begin(), list.end(), word) == list.end()) list.push_back(std::string(word));
}

std::vector<std::string> variable_names() {
  std::vector<std::string> names;
  for (const Variable& variable : kVariables) names.emplace_back(variable.name);
  return names;
}

}  // namespace

std::vector<std::string> apply_environment(Json& root, std::string_view only_group) {
  std::vector<std::string> honoured;
  // For each key, the variable that set it and the value: two variables must not contradict each other.
  std::map<std::string_view, std::string> set_by, set_values;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals), value = text.substr(equals + 1);
    const auto is_named = [&](const Variable& v) { return v.name == name; };
    if (name.starts_with("NSA_") && std::none_of(std::begin(kVariables), std::end(kVariables), is_named))
      fail_usage("unknown environment variable {} (value \"{}\"){}", name, shown_value(name, value),
                 did_you_mean(name, variable_names()));
    for (const Variable& variable : kVariables) {
      if (!is_named(variable)) continue;
      if (!only_group.empty() && variable.key.substr(0, variable.key.find('.')) != only_group) continue;
      if (variable.effect == Effect::none) {
        honoured.push_back(fmt::format("{}={}: no effect, always so", name, value));
        continue;
      }
      if (variable.effect == Effect::joins) {
        if (!read_flag(name, value)) continue;
        join_list(root, variable.key, variable.word);
      } else {
        const std::optional<std::string> becomes = value_of(variable, value);
        if (!becomes) continue;
        const auto [before, is_new] = set_by.try_emplace(variable.key, fmt::format("{}={}", name, value));
        if (!is_new && set_values.at(variable.key) != *becomes)
          fail_usage("environment variables {} and {}={} contradict each other: both set {}", before->second, name,
                     value, variable.key);
        set_values[variable.key] = *becomes;
        set_json_key(root, fmt::format("{}={}", variable.key, *becomes));
      }
      honoured.push_back(fmt::format("{}={} -> {}", name, value, variable.key));
    }
  }
  return honoured;
}

std::string shown_value(std::string_view variable, std::string_view value) {
  std::string name(variable);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
  for (const char* part : {"JWT", "TOKEN", "KEY", "SECRET", "PASS", "CRED"})
    if (name.find(part) != std::string::npos) return "(set)";
  return std::string(value);
}

Json shown_environment() {
  constexpr std::string_view kPrefixes[] = {"NSA_", "CUDA_", "NCCL_", "OMPI_", "PMI", "SLURM_", "OMP_"};
  constexpr std::string_view kNames[] = {
      "CONFIG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
  Json variables = Json::object();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals);
    const bool shown =
        std::any_of(std::begin(kPrefixes), std::end(kPrefixes), [&](auto each) { return name.starts_with(each); }) ||
        std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
    if (shown) variables[std::string(name)] = shown_value(name, text.substr(equals + 1));
  }
  return variables;
}

void check_environment() {
  Json ignored = Json::object();
  apply_environment(ignored);
}

}  // namespace triad
