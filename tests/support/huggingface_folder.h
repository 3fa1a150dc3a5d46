// A tiny model folder as transformers writes it, made without transformers: config.json and random weights, which a
// test changes before write().
#pragma once
#include <map>
#include <string>
#include <vector>

#include "io/json_config.h"

namespace triad::test {

struct FolderTensor {
  std::string dtype = "F32";  // F32, BF16, F16, or a 4-byte dtype that import refuses
  std::vector<int64_t> shape;
  std::vector<float> values;  // finite values are multiples of 1/256 below 1, exact in every dtype
};

struct HuggingFaceFolder {
  Json config;
  std::map<std::string, FolderTensor> tensors;  // keyed by transformers' names
  bool index = true;                            // write an index for several files

  // Writes config.json and the weights: model.safetensors, or several files with model.safetensors.index.json.
  void write(const std::string& folder, size_t files = 1) const;
  void set_dtype(const std::string& dtype);
  void set_vocabulary(int64_t tokens);  // repeats embedding and head rows
};
// A Llama: 2 layers, width 32, 4 heads (8 wide) in 2 groups, MLP 48, vocabulary 64, 128 positions.
HuggingFaceFolder tiny_llama();

// Text for a tokenizer.json with at most kBpeTokens tokens.
inline constexpr int64_t kBpeTokens = 448;
std::string bpe_tokenizer_json();

}  // namespace triad::test
