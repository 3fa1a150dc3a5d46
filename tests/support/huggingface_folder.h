// A tiny model folder as transformers writes it, made without transformers: config.json and random weights, which a
// test changes before write().
#pragma once
#include <map>
#include <string>
#include <vector>

#include "io/json_config.h"

namespace triad::test {

struct FolderTensor {
  std::string dtype = "F32";  // F32, BF16, F16, or a dtype of 4-byte elements that import refuses
  std::vector<int64_t> shape;
  std::vector<float> values;  // finite values are multiples of 1/256 below 1, exact in every dtype
};

struct HuggingFaceFolder {
  Json config;
  std::map<std::string, FolderTensor> tensors;  // by transformers' names
  bool index = true;                            // write the index of several files

  // Writes config.json and the weights: model.safetensors, or several files with model.safetensors.index.json.
  void write(const std::string& folder, size_t files = 1) const;
  void set_dtype(const std::string& dtype);
  void set_vocabulary(int64_t tokens);  // repeats the rows of embedding and head
};
// A Llama of 2 layers, width 32, 4 heads of 8 in 2 groups, MLP 48, vocabulary 64, 128 positions.
HuggingFaceFolder tiny_llama();

// The text of a tokenizer.json of at most kBpeTokens tokens.
inline constexpr int64_t kBpeTokens = 448;
std::string bpe_tokenizer_json();

}  // namespace triad::test
