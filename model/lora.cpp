#include "model/lora.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"

namespace triad {

namespace {

constexpr std::string_view kAllLinear = "all-linear";

struct Target {
  LoraPlace place;
  ParamRole role;
  std::array<std::string_view, 2> words;  // a projection's name in files, and in transformers if that differs
};
// mlp_in and mlp_out have a name for each kind of MLP.
constexpr Target kTargets[] = {{LoraPlace::qkv, ParamRole::q_proj, {"q_proj"}},
                               {LoraPlace::qkv, ParamRole::k_proj, {"k_proj"}},
                               {LoraPlace::qkv, ParamRole::v_proj, {"v_proj"}},
                               {LoraPlace::out_proj, ParamRole::out_proj, {"o_proj", "out_proj"}},
                               {LoraPlace::mlp_in, ParamRole::mlp_in, {"gate_proj", "fc1"}},
                               {LoraPlace::mlp_in, ParamRole::mlp_up, {"up_proj"}},
                               {LoraPlace::mlp_out, ParamRole::mlp_out, {"down_proj", "fc2"}}};

const Target* target_of(ParamRole role) {
  const auto* const it = std::ranges::find(kTargets, role, &Target::role);
  return it == std::end(kTargets) ? nullptr : it;
}

// Whether a word names the projection with this weight in this model.
bool is_named(const Target& target, std::string_view word, const ModelConfig& c) {
  const bool silu = c.mlp == MlpKind::silu;
  switch (target.role) {
    case ParamRole::mlp_in:
    case ParamRole::mlp_out:
      return word == target.words[silu ? 1 : 0];
    default:
      return !word.empty() && std::ranges::find(target.words, word) != target.words.end();
  }
}

bool is_adapted(const ParamSpec& spec, const LoraConfig& lora, const ModelConfig& c) {
  const Target* const target = target_of(spec.role);
  if (target == nullptr) return false;
  return std::ranges::any_of(lora.targets,
                             [&](const auto& word) { return word == kAllLinear || is_named(*target, word, c); });
}

constexpr std::array<std::pair<ParamRole, ParamRole>, kLoraPlaces> kRoles = {
    {{ParamRole::lora_qkv_a, ParamRole::lora_qkv_b},
     {ParamRole::lora_out_proj_a, ParamRole::lora_out_proj_b},
     {ParamRole::lora_mlp_in_a, ParamRole::lora_mlp_in_b},
     {ParamRole::lora_mlp_out_a, ParamRole::lora_mlp_out_b}}};

}  // namespace

double LoraConfig::scale() const {
  const double r = static_cast<double>(rank), a = alpha > 0 ? alpha : r;
  return rslora ? a / std::sqrt(r) : a / r;
}

void check_lora(const ModelConfig& c, const LoraConfig& lora) {
  const std::vector<ParamSpec> specs = param_specs(c);
  if (lora.targets.empty()) fail_usage("train.lora.targets is empty: it names the projections to adapt");
  for (const std::string& word : lora.targets) {
    if (word == kAllLinear) continue;
    const bool there = std::ranges::any_of(specs, [&](const ParamSpec& spec) {
      const Target* const target = target_of(spec.role);
      return target != nullptr && is_named(*target, word, c);
    });
    if (there) continue;
    std::vector<std::string_view> names = {kAllLinear};
    for (const Target& target : kTargets)
      for (const std::string_view name : target.words)
        if (is_named(target, name, c) && std::ranges::find(specs, target.role, &ParamSpec::role) != specs.end()) {
          names.push_back(name);
          break;
        }
    fail_usage("train.lora.targets holds \"{}\": no layer of this model has it; {} are allowed", shortened(word),
               fmt::join(names, ", "));
  }
  for (const ParamSpec& spec : specs)
    if (is_adapted(spec, lora, c) && lora.rank > std::min(spec.shape[0], spec.shape[1]))
      fail_usage("train.lora.rank is {}: {} is {}, and its adapter's rank is at most {}", lora.rank, spec.name,
                 spec.shape.str(), std::min(spec.shape[0], spec.shape[1]));
}

std::string lora_name(const std::string& weight, char matrix) {
  constexpr std::string_view kSuffix = "weight";
  TRIAD_CHECK(weight.ends_with(kSuffix), "an adapter of {}", weight);
  return fmt::format("{}lora_{}.weight", weight.substr(0, weight.size() - kSuffix.size()), matrix);
}

std::vector<std::string> adapted_weights(const ModelConfig& c, const LoraConfig& lora) {
  std::vector<std::string> names;
  for (const ParamSpec& spec : param_specs(c))
    if (is_adapted(spec, lora, c)) names.push_back(spec.name);
  return names;
}

std::vector<ParamSpec> param_specs(const ModelConfig& c, const std::optional<LoraConfig>& lora) {
  std::vector<ParamSpec> specs = param_specs(c);
  if (!lora) return specs;
  std::vector<ParamSpec> adapters;
  for (int64_t layer = 0; layer < c.n_layers; ++layer)
    for (size_t place = 0; place < kLoraPlaces; ++place) {
      const auto add = [&](char matrix) {
        bool first = true;
        for (const ParamSpec& spec : specs) {
          if (spec.layer != layer || !is_adapted(spec, *lora, c) ||
              target_of(spec.role)->place != static_cast<LoraPlace>(place))
            continue;
          ParamSpec a = {.role = kRoles[place].first,
                         .layer = layer,
                         .branch = spec.branch,
                         .name = lora_name(spec.name, matrix),
                         .shape = {lora->rank, spec.shape[1]},
                         .init = ParamSpec::Init::uniform,
                         // PEFT's kaiming_uniform_(a = sqrt(5))
                         .value = 1 / std::sqrt(static_cast<double>(spec.shape[1]))};
          if (matrix == 'B') {
            a.role = kRoles[place].second, a.shape = {spec.shape[0], lora->rank};
            a.init = ParamSpec::Init::constant, a.value = 0;
          }
          a.joins_previous = !std::exchange(first, false);
          adapters.push_back(std::move(a));
        }
      };
      add('A');
      add('B');
    }
  for (ParamSpec& spec : specs) spec.frozen = !stays_trained(spec.role);
  for (ParamSpec& adapter : adapters) {
    adapter.number = static_cast<int64_t>(specs.size());
    specs.push_back(std::move(adapter));
  }
  return specs;
}

std::vector<ParamSpec> trained_specs(const ModelConfig& c, const std::optional<LoraConfig>& lora) {
  std::vector<ParamSpec> specs = param_specs(c, lora);
  std::erase_if(specs, [](const ParamSpec& spec) { return spec.frozen; });
  return specs;
}

std::vector<ParamSpec> frozen_specs(const ModelConfig& c, const std::optional<LoraConfig>& lora) {
  std::vector<ParamSpec> specs = param_specs(c, lora);
  std::erase_if(specs, [](const ParamSpec& spec) { return !spec.frozen; });
  return specs;
}

int64_t count_elements(const std::vector<ParamSpec>& specs) {
  int64_t n = 0;
  for (const ParamSpec& spec : specs) n += spec.shape.numel();
  return n;
}

std::vector<LoraLayer> lora_layers(const ModelConfig& c, const std::optional<LoraConfig>& lora) {
  std::vector<LoraLayer> layers(static_cast<size_t>(c.n_layers));
  if (!lora) return layers;
  int64_t column = 0;  // its number in the fused linear layer
  for (const ParamSpec& spec : param_specs(c)) {
    const Target* const target = target_of(spec.role);
    if (target == nullptr) continue;
    if (!spec.joins_previous) column = 0;
    LoraLayer& layer = layers[static_cast<size_t>(spec.layer)];
    layer.scale = lora->scale();
    if (is_adapted(spec, *lora, c))
      layer.pieces[static_cast<size_t>(target->place)].push_back({column, column + spec.shape[0]});
    column += spec.shape[0];
  }
  return layers;
}

}  // namespace triad
