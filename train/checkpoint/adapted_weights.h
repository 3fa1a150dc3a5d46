// A model with adapters (train.lora): its checkpoints hold what is trained, and the frozen weights are those of
// train.init_from, the base. The run reads both; other readers get the merged weights, W + scale * B A.
#pragma once
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "train/checkpoint/state.h"

namespace triad {

// The tensor of another model with which each parameter of ours begins. A dense model's can begin an NSA model
// (model/from_dense.h), those of a layer with three branches one softmax (its k_win and v_win), and any a layer with a
// taught index, which is fresh where the checkpoint has none. Null if they are those of the same model.
NameOf init_names(const ModelConfig& ours, const ModelConfig& theirs);

// The model whose weights a config with train.lora freezes. Throws if it has adapters itself.
ModelSource find_base(const Config&);
// The checksums {NAME: checksum} of the base's files, without those of other programs' files, which have none.
Json base_checksums(const ModelSource& base);
// Throws Error if a checkpoint's adapters belong to another base, by the checksums in its state.json (null: unknown).
// whose: the checkpoint, for the message.
void check_base(const std::string& whose, const Json& known, const ModelSource& base);
// Reads the frozen weights, Model::base(), of a model that begins with the base's.
void load_base(Context&, Params& frozen, const ModelConfig&, const ModelSource& base);

// Any model's weights, merged if it has adapters.
class ModelWeights {
 public:
  // Throws Error if a tensor is missing, unknown or misshapen, or if the base is another than the adapters'.
  explicit ModelWeights(const ModelSource&);

  const std::vector<ParamSpec>& specs() const { return specs_; }
  bool merges() const { return base_ != nullptr; }
  const WeightIndex& own() const { return *own_; }  // the checkpoint's own files
  // The files with the tensor of a parameter, and its name there.
  std::pair<const WeightIndex*, std::string> place_of(const ParamSpec&) const;
  // Adds what the adapters add to a parameter's elements from `first` on; nothing if it has none.
  void add_adapter(const ParamSpec&, int64_t first, std::span<float> values) const;

 private:
  struct Adapter {
    std::vector<float> a, b;  // [rank,in], [out,rank], b with the scale
  };
  std::vector<ParamSpec> specs_;
  std::unique_ptr<const WeightIndex> own_, base_;  // base_: null without adapters
  NameOf base_name_;
  int64_t rank_ = 0;
  std::map<std::string, Adapter> adapters_;  // key: the weight's name
};

// Sets a model's weights, merged if it has adapters.
void load_model(Context&, Params&, const ModelSource&);

}  // namespace triad
