// Token sources: endless synthetic tokens, text files, token shards; each as a training and a validation source that do
// not overlap.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/data/permutation.h"
#include "io/tokenizer/tokenizer.h"

namespace triad {

// A long sequence of tokens with random access. Thread-safe.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual int64_t size() const = 0;
  // Reads tokens [begin, begin + out.size()). Throws if the range exceeds size().
  virtual void read(int64_t begin, std::span<int32_t> out) const = 0;
  // Reads a training sequence. targets[i] is the token that tokens[i] must predict, the next one by default; the loss
  // ignores -1. Both spans have the same size.
  virtual void read_sequence(int64_t begin, std::span<int32_t> tokens, std::span<int32_t> targets) const;
  // The number of targets other than -1 in a sequence of this length, the same for every sequence.
  virtual int64_t count_targets(int64_t seq_len) const { return seq_len; }
  virtual std::string name() const = 0;  // for messages: "the validation split of 12 text files"
};

struct DataSplit {
  std::shared_ptr<const TokenSource> train, val;  // val is empty if val_fraction is 0
};

std::shared_ptr<const TokenSource> no_tokens();  // an empty source

// Uniform tokens in {0, .., vocab-1}, a pure function of (seed, split, position). The lowest possible loss is
// ln(vocab).
DataSplit synthetic_data(int64_t vocab, uint64_t seed, double val_fraction);

// How files are split. If val_paths is not empty, it is the validation split; a file in both lists throws.
struct SplitOptions {
  std::vector<std::string> paths, val_paths;  // files or globs; for shards also folders with a manifest.json
  double val_fraction = 0;
  uint64_t seed = 0;  // of the random choice of validation documents
};
// Text files, one document each, held in memory as tokens, with tokenizer.eot() before each document. The split is by
// document, chosen by seed; a single document is split by position: its last val_fraction is for validation. Empty
// files are skipped. A token shard throws.
DataSplit text_data(const SplitOptions&, const Tokenizer&);
// Token shards (io/data/shards.h), in the order of their names. Each shard is checked and scanned for tokens >= vocab
// before the first token is used, and checked again at each read. The last val_fraction of the tokens is for
// validation.
DataSplit shard_data(const SplitOptions&, int64_t vocab);

// Files of one kind, recognized by their first bytes: token shards or text. No validation split.
std::shared_ptr<const TokenSource> open_tokens(const std::vector<std::string>& paths, const Tokenizer&, int64_t vocab);

// The number of training tokens at the beginning of n_tokens that are split by position.
int64_t train_part(int64_t n_tokens, double val_fraction);

// The choice of validation documents among n: a share of val_fraction, at least one and never all of them, chosen by
// seed alone. None if val_fraction is 0 or n is 1.
class HeldOut {
 public:
  HeldOut(int64_t n_documents, double val_fraction, uint64_t seed);
  bool operator()(int64_t document) const { return count_ > 0 && order_(document) < count_; }
  int64_t count() const { return count_; }

 private:
  int64_t count_;
  Permutation order_;
};

}  // namespace triad
