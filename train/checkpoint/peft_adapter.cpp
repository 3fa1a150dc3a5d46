#include "train/checkpoint/peft_adapter.h"

#include <cmath>
#include <filesystem>
#include <set>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/file.h"
#include "io/huggingface/tensor_names.h"
#include "model/from_dense.h"
#include "train/checkpoint/param_reader.h"

namespace triad {

namespace {

constexpr const char* kKey = "train.lora.init_from";

// Compares a folder's adapter_config.json with train.lora.
void check_config(const std::string& path, const LoraConfig& lora) {
  const Json json = parse_json(read_file(path), path);
  TRIAD_CHECK(json.is_object() && json.value("peft_type", Json()) == "LORA", "{}: {}: peft_type is {}: LORA is needed",
              kKey, path, json.is_object() ? brief(json.value("peft_type", Json())) : "absent");
  const auto refuse_unless = [&](const char* key, bool allowed, const std::string& needed) {
    TRIAD_CHECK(allowed, "{}: {}: {} is {}: {} is needed", kKey, path, key, brief(json.value(key, Json())), needed);
  };
  const auto is_absent = [&](const char* key) {
    const Json value = json.value(key, Json());
    return value.is_null() || value == false || value.empty() || value == "none";
  };
  for (const char* key : {"use_dora", "bias", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
                          "lora_bias", "layers_to_transform", "target_parameters"})
    refuse_unless(key, is_absent(key), "none");
  refuse_unless("r", json.value("r", Json()) == lora.rank, fmt::format("train.lora.rank, {},", lora.rank));
  const Json alpha = json.value("lora_alpha", Json());
  refuse_unless("lora_alpha", alpha.is_number(), "a number");
  LoraConfig its = lora;
  its.alpha = alpha.get<double>(), its.rslora = json.value("use_rslora", Json()) == true;
  TRIAD_CHECK(its.scale() == lora.scale(),
              "{}: {}: lora_alpha {} with use_rslora {} multiplies by {:.6g}, but train.lora by {:.6g}: set "
              "train.lora.alpha and rslora to its values",
              kKey, path, its.alpha, its.rslora, its.scale(), lora.scale());
}

}  // namespace

std::string peft_tensor_name(const ParamSpec& adapter) {
  const size_t at = adapter.name.find(".lora_");
  TRIAD_CHECK(at != std::string::npos, "{} is no adapter", adapter.name);
  ParamSpec weight = adapter;
  weight.role = ParamRole::q_proj;  // any that a dense model has
  weight.name = adapter.name.substr(0, at) + ".weight";
  const std::optional<std::string> name = huggingface_name(dense_source(weight));
  TRIAD_CHECK(name.has_value(), "{}: transformers' classes have no such projection", weight.name);
  constexpr std::string_view kSuffix = ".weight";
  return "base_model.model." + name->substr(0, name->size() - kSuffix.size()) + adapter.name.substr(at);
}

Json peft_config(const ModelConfig& config, const LoraConfig& lora, const Json& base) {
  std::set<std::string> modules;
  for (const ParamSpec& spec : param_specs(config, lora)) {
    if (!is_adapter(spec.role)) continue;
    const std::string name = peft_tensor_name(spec), module = name.substr(0, name.find(".lora_"));
    modules.insert(module.substr(module.rfind('.') + 1));
  }
  return {{"peft_type", "LORA"},
          {"task_type", "CAUSAL_LM"},
          {"base_model_name_or_path", base},
          {"revision", nullptr},
          {"inference_mode", true},
          {"r", lora.rank},
          {"lora_alpha", lora.alpha > 0 ? lora.alpha : static_cast<double>(lora.rank)},
          {"lora_dropout", 0.0},
          {"use_rslora", lora.rslora},
          {"use_dora", false},
          {"bias", "none"},
          {"fan_in_fan_out", false},
          {"init_lora_weights", true},
          {"target_modules", modules},
          {"modules_to_save", nullptr},
          {"rank_pattern", Json::object()},
          {"alpha_pattern", Json::object()}};
}

void read_peft_adapter(Context& ctx, const Params& params, Optimizer& optimizer, const LoraConfig& lora) {
  const std::filesystem::path folder = lora.init_from;
  check_config((folder / kPeftConfig).string(), lora);
  const WeightIndex index((folder / kPeftWeights).string());
  const NameOf name_of = [&](const ParamSpec& spec) {
    return is_adapter(spec.role) ? peft_tensor_name(spec) : std::string();
  };
  std::set<std::string> expected;
  for (const ParamSpec& spec : params.specs()) expected.insert(name_of(spec));
  for (const std::string& name : expected)
    TRIAD_CHECK(name.empty() || index.find(name) != nullptr,
                "{}: {}: it has no tensor {}, an adapter of train.lora.targets", kKey, index.path(), name);
  index.for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
    TRIAD_CHECK(expected.contains(entry.name), "{}: {}: tensor {} is no adapter of train.lora.targets in this model",
                kKey, file.path(), shortened(entry.name));
  });
  std::vector<ElementRange> ranges;
  for (const Parts::Part& part : optimizer.parts(Optimizer::State::parameter)) ranges.push_back(part.elements);
  read_params(index, params, name_of, ranges, ctx.device, [&](int64_t begin, std::span<const float> values) {
    optimizer.set(ctx, Optimizer::State::parameter, begin, values);
  });
  optimizer.publish(ctx);
}

}  // namespace triad
