// Token sources: endless synthetic tokens, text files, or token shards; each gives a training and a validation source
// that do not overlap.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/chat/chat_options.h"
#include "io/data/data_files.h"
#include "io/data/documents.h"
#include "io/data/format/text_format.h"
#include "io/data/loss_mask.h"
#include "io/data/permutation.h"
#include "io/tokenizer/tokenizer.h"

namespace triad {

// A long token sequence with random access. Thread-safe.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual int64_t size() const = 0;
  // Reads the tokens [begin, begin + out.size()). Throws if the range exceeds size().
  virtual void read(int64_t begin, std::span<int32_t> out) const = 0;
  // Reads a training sequence from position `begin` on. targets[i] is the token that the model must predict at
  // tokens[i], by default the next token; the loss ignores the target -1. Both spans have the same size. The mask is
  // not applied.
  virtual void read_sequence(int64_t begin, std::span<int32_t> tokens, std::span<int32_t> targets) const;
  // How many targets other than -1 a sequence with this length has; the same for every sequence.
  virtual int64_t count_targets(int64_t seq_len) const { return seq_len; }
  // Where the documents begin; null if that is unknown. The index lives as long as the source.
  virtual const DocumentIndex* documents() const { return nullptr; }
  // Which tokens are learned. It lives as long as the source.
  virtual MaskView mask() const { return {}; }
  // A sentence for the user about a problem with the tokens; empty: none.
  virtual std::string warning() const { return {}; }
  // The files that the tokens come from; null for generated tokens.
  virtual DataFiles files() const { return nullptr; }
  // How the conversations among the documents are written; null if there are none.
  virtual std::shared_ptr<const ChatFormat> chat() const { return nullptr; }
  virtual std::string name() const = 0;  // name for messages: "the validation split of 12 text files"

 protected:
  void check_range(int64_t begin, std::span<int32_t> out) const;  // throws as read() does
};

struct DataSplit {
  std::shared_ptr<const TokenSource> train, val;  // val is empty if val_fraction is 0
};

// source.documents(); throws an Error if they are not known.
const DocumentIndex& require_documents(const TokenSource& source);

std::shared_ptr<const TokenSource> no_tokens();  // a source without any tokens

// Synthetic tokens, uniform in {0, .., vocab-1}, a pure function of (seed, split, position). The lowest possible mean
// loss is ln(vocab).
DataSplit synthetic_data(int64_t vocab, uint64_t seed, double val_fraction);

// How files are split into training and validation. If val_paths is not empty, it is the validation split; a file in
// both lists throws, and so does a shard in one that equals a shard in the other.
struct SplitOptions {
  std::vector<std::string> paths, val_paths;  // files or globs; for shards also folders with a manifest.json
  double val_fraction = 0;
  uint64_t seed = 0;  // seed for choosing validation documents
  TextFormat format = TextFormat::automatic;
  bool accept_changed = false;  // what differs from a shard's manifest is a warning, no error
  ChatOptions chat = {};        // how the texts' conversations are written
};
// Token sources from text files, one document each, and from JSONL files (content_of()), whose lines are documents
// (io/data/record.h), with a mask if some of their text is not learned. gzip and zstd are decompressed; other
// compression throws. Held in memory as tokens, with tokenizer.eot() before each document. The seed chooses the
// validation documents. A single document is split by position instead: its last val_fraction is for validation. Empty
// files are skipped. A token shard among the files throws.
DataSplit text_data(const SplitOptions&, const Tokenizer&);
// Whether the first record of the first of these files of JSONL is a conversation.
bool begins_with_conversation(const std::vector<std::string>& paths, TextFormat);
// Token sources from shards (io/data/shards.h), in name order. Each shard is checked and scanned for tokens >= vocab
// before the first token is used, and checked again at each read. The same scan compares the shards with what their
// manifests say, and finds the documents if these name the separator. Masks are held in memory. The last val_fraction
// of all tokens is for validation.
DataSplit shard_data(const SplitOptions&, int64_t vocab);

// One token source without a validation split, from one kind of files: token shards, or text and JSONL.
std::shared_ptr<const TokenSource> open_tokens(const std::vector<std::string>& paths, const Tokenizer&, int64_t vocab,
                                               TextFormat format = TextFormat::automatic, const ChatOptions& chat = {});

// If n_tokens tokens are split by position: how many at the beginning are for training.
int64_t train_part(int64_t n_tokens, double val_fraction);

// Which of n documents are for validation: a share val_fraction, at least one and never all, which depends on the seed
// alone. None if val_fraction is 0 or n is 1.
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
