#include "train/checkpoint/adapted_weights.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/tensor_reader.h"
#include "model/from_dense.h"
#include "model/lora.h"
#include "train/checkpoint/param_reader.h"

namespace triad {

namespace {

std::vector<float> read_tensor(const WeightIndex& index, const std::string& name) {
  const TensorEntry& entry = index.at(name);
  std::vector<float> all(static_cast<size_t>(entry.numel()));
  const TensorRange whole = {&index.file_of(name), &entry, 0, entry.numel()};
  read_ranges({&whole, 1}, [&](size_t, int64_t first, std::span<const float> values) {
    std::ranges::copy(values, all.begin() + first);
  });
  return all;
}

NameOf names_or_own(const ModelConfig& ours, const ModelConfig& theirs) {
  const NameOf names = init_names(ours, theirs);
  return names ? names : with_prefix("");
}

std::string adapter_file_name(const SafetensorsFile& file) {
  return std::filesystem::path(file.path()).filename().string();
}

}  // namespace

NameOf init_names(const ModelConfig& ours, const ModelConfig& theirs) {
  if (ours.has_nsa() && !theirs.has_nsa()) return dense_source;
  bool same = true;
  std::vector<bool> begins_index;
  for (int64_t i = 0; i < ours.n_layers; ++i) {
    const AttentionKind our_kind = ours.attention_of(i), their_kind = theirs.attention_of(i);
    const bool dense = our_kind == AttentionKind::dense || their_kind == AttentionKind::dense;
    begins_index.push_back(ours.has_index(i) && !theirs.has_index(i));
    same = same && !begins_index.back() && (dense || our_kind == their_kind);
  }
  if (same) return nullptr;
  return [begins_index](const ParamSpec& spec) {
    return is_index(spec.role) && begins_index[static_cast<size_t>(spec.layer)] ? std::string() : spec.name;
  };
}

Json base_checksums(const ModelSource& base) {
  Json checksums = Json::object();
  const WeightIndex index(base.weights);
  for (const SafetensorsFile& file : index.files())
    if (const auto checksum = file.checksum()) checksums[adapter_file_name(file)] = fmt::format("{:08x}", *checksum);
  return checksums;
}

void check_base(const std::string& whose, const Json& known, const ModelSource& base) {
  if (known.is_null()) return;
  const Json now = base_checksums(base);
  if (known != now)
    fail(
        "{}: its adapters were trained on other weights than those of {} (train.init_from): the checksums are {} "
        "there, "
        "and {} here",
        whose, base.weights, brief(known), brief(now));
}

void load_base(Context& ctx, Params& frozen, const ModelConfig& ours, const ModelSource& base) {
  const WeightIndex index(base.weights);
  const NameOf name_of = names_or_own(ours, base.config.model);
  check_names(index, frozen, {name_of}, param_specs(base.config.model));
  frozen.clear(ctx);
  const ElementRange all{0, frozen.stored_elements()};
  read_params(index, frozen, name_of, {&all, 1}, ctx.device,
              [&](int64_t begin, std::span<const float> values) { frozen.set(ctx, begin, values); });
}

ModelSource find_base(const Config& config) {
  const std::string& path = config.train.init_from;
  const ModelSource base = [&] {
    try {
      return find_model(path);
    } catch (const UsageError& e) { fail_usage("train.init_from: {}", e.what()); } catch (const Error& e) {
      fail("train.init_from: {}", e.what());
    }
  }();
  if (base.config.train.lora)
    fail_usage(
        "train.init_from is {}, which holds adapters (train.lora) of {}: triad export --format triad merges the two, "
        "and its folder can be train.init_from",
        path, base.config.train.init_from);
  return base;
}

ModelWeights::ModelWeights(const ModelSource& source)
    : specs_(param_specs(source.config.model)), own_(std::make_unique<WeightIndex>(source.weights)) {
  const std::optional<LoraConfig>& lora = source.config.train.lora;
  if (!lora) return;
  const ModelSource base = find_base(source.config);
  check_base(source.weights, source.base, base);
  base_ = std::make_unique<WeightIndex>(base.weights);
  base_name_ = names_or_own(source.config.model, base.config.model);
  rank_ = lora->rank;
  std::set<std::string> known;
  for (const ParamSpec& spec : trained_specs(source.config.model, lora)) {
    known.insert(spec.name);
    const TensorEntry& entry = own_->at(spec.name);
    TRIAD_CHECK(entry.shape == std::vector<int64_t>(spec.shape.dim.begin(), spec.shape.dim.begin() + spec.shape.rank),
                "{}: tensor {} is {}, but the model's is {}", own_->file_of(spec.name).path(), entry.name, entry.str(),
                spec.shape.str());
  }
  own_->for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
    TRIAD_CHECK(known.contains(entry.name), "{}: tensor {} is none of the adapters'", file.path(),
                shortened(entry.name));
  });
  for (const std::string& weight : adapted_weights(source.config.model, *lora)) {
    Adapter adapter = {read_tensor(*own_, lora_name(weight, 'A')), read_tensor(*own_, lora_name(weight, 'B'))};
    for (float& value : adapter.b) value = static_cast<float>(lora->scale() * static_cast<double>(value));
    adapters_.emplace(weight, std::move(adapter));
  }
}

std::pair<const WeightIndex*, std::string> ModelWeights::place_of(const ParamSpec& spec) const {
  if (!base_ || stays_trained(spec.role)) return {own_.get(), spec.name};
  return {base_.get(), base_name_(spec)};
}

void ModelWeights::add_adapter(const ParamSpec& spec, int64_t first, std::span<float> values) const {
  const auto it = adapters_.find(spec.name);
  if (it == adapters_.end()) return;
  const Adapter& adapter = it->second;
  const int64_t width = spec.shape[1], end = first + static_cast<int64_t>(values.size());
  std::vector<float> sums(static_cast<size_t>(width));
  for (int64_t row = first / width; row * width < end; ++row) {
    const int64_t begin = std::max(first - row * width, int64_t{0}), until = std::min(end - row * width, width);
    std::ranges::fill(sums, 0.0f);
    for (int64_t k = 0; k < rank_; ++k) {
      const float factor = adapter.b[static_cast<size_t>(row * rank_ + k)];
      const float* const a = adapter.a.data() + k * width;
      for (int64_t j = begin; j < until; ++j) sums[static_cast<size_t>(j)] += factor * a[j];
    }
    for (int64_t j = begin; j < until; ++j)
      values[static_cast<size_t>(row * width + j - first)] += sums[static_cast<size_t>(j)];
  }
}

void load_model(Context& ctx, Params& params, const ModelSource& source) {
  if (!source.config.train.lora) return load_weights(ctx, params, source.weights);
  const ModelWeights weights(source);
  std::vector<int64_t> by_offset(static_cast<size_t>(params.count()));
  std::iota(by_offset.begin(), by_offset.end(), 0);
  std::ranges::sort(by_offset, {}, [&](int64_t i) { return params.offset(i); });
  const auto param_at = [&](int64_t element) {
    return *std::prev(std::ranges::upper_bound(by_offset, element, {}, [&](int64_t i) { return params.offset(i); }));
  };
  params.clear(ctx);
  const ElementRange all{0, params.stored_elements()};
  std::vector<float> merged;
  std::set<const WeightIndex*> read;
  for (const ParamSpec& its : params.specs()) {
    const WeightIndex* const index = weights.place_of(its).first;
    if (!read.insert(index).second) continue;
    const NameOf name_of = [&](const ParamSpec& spec) {
      const auto [in, name] = weights.place_of(spec);
      return in == index ? name : std::string();
    };
    read_params(*index, params, name_of, {&all, 1}, ctx.device, [&](int64_t begin, std::span<const float> values) {
      const int64_t i = param_at(begin);
      merged.assign(values.begin(), values.end());
      weights.add_adapter(params.specs()[static_cast<size_t>(i)], begin - params.offset(i), merged);
      params.set(ctx, begin, merged);
    });
  }
}

}  // namespace triad
