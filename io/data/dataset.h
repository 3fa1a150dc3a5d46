// Where tokens come from: endless synthetic ones, text files, token shards; each as a training and a validation source
// that never overlap.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/data/permutation.h"
#include "io/tokenizer/tokenizer.h"

namespace triad {

// A long row of tokens, readable anywhere, by any thread.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual int64_t size() const = 0;
  // Tokens [begin, begin + out.size()), which lie within size().
  virtual void read(int64_t begin, std::span<int32_t> out) const = 0;
  // A training sequence: tokens from begin on, and what each of them is to predict: the one behind it, or -1, which the
  // loss leaves out. Both of one size.
  virtual void read_sequence(int64_t begin, std::span<int32_t> tokens, std::span<int32_t> targets) const;
  // Of the targets of a sequence of this length, those that are not -1: the same number in each.
  virtual int64_t count_targets(int64_t seq_len) const { return seq_len; }
  virtual std::string name() const = 0;  // "the validation split of 12 text files", for messages
};

struct DataSplit {
  std::shared_ptr<const TokenSource> train, val;  // val of val_fraction 0 is a source without tokens
};

std::shared_ptr<const TokenSource> no_tokens();  // an empty source

// Uniform tokens of {0, .., vocab-1}, a pure function of (seed, split, position): the loss floor is ln(vocab).
DataSplit synthetic_data(int64_t vocab, uint64_t seed, double val_fraction);

// How the files are shared out. val_paths not empty: they are the validation split, and a file in both is an Error.
struct SplitOptions {
  std::vector<std::string> paths, val_paths;  // files or globs; of shards also folders with a manifest.json
  double val_fraction = 0;
  uint64_t seed = 0;  // of the choice of validation documents
};
// Text files, one document each, held in memory; tokenizer.eot() before each. The split is by document, chosen by seed;
// a single document is split by position, its last val_fraction. Documents without a byte are left out. A token shard
// given as text is an Error.
DataSplit text_data(const SplitOptions&, const Tokenizer&);
// Token shards (io/data/shards.h), in the order of their names. Each is checked and scanned for tokens >= vocab before
// the first is used, and again as tokens are read. The split: the last val_fraction of the tokens.
DataSplit shard_data(const SplitOptions&, int64_t vocab);

// Files of one kind, told apart by their first bytes: token shards or text. Nothing is held out.
std::shared_ptr<const TokenSource> open_tokens(const std::vector<std::string>& paths, const Tokenizer&, int64_t vocab);

// Of a row of n tokens that is split by position: how many come first and are for training.
int64_t train_part(int64_t n_tokens, double val_fraction);

// Which of n documents are held out for validation: a share of val_fraction, at least one of them and never all
// (val_fraction 0, or a single document: none), chosen by seed alone.
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
