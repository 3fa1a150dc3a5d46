// The shards that one call of `triad data` writes: two streams of tokens, train and val, cut into files of a chosen
// size, and the state that a later call needs to resume after a kill.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "io/data/corpus.h"
#include "io/data/permutation.h"
#include "io/data/shards.h"
#include "io/json_config.h"

namespace triad {

// The choice of validation documents in a stream whose length is not known yet: of each 1/val_fraction consecutive
// documents, the seed chooses one, but never the very first document. So after n documents, n * val_fraction +- 1 are
// chosen.
class HeldOutStream {
 public:
  HeldOutStream(double val_fraction, uint64_t seed);
  bool operator()(int64_t document) const;

 private:
  int64_t first_of(int64_t stratum) const;

  double fraction_;
  Philox random_;
};

// FOLDER/PREFIX_000000.bin, ... of exactly shard_tokens tokens each, except the last. Documents may span two shards.
class ShardRow {
 public:
  ShardRow(std::string folder, std::string prefix, TokenWidth width, int64_t shard_tokens);
  // Continues from the state that pause() returned; later files of this prefix are removed.
  void resume(const Json& paused);
  void append(std::span<const int32_t> tokens);
  void begin_document();
  Json pause();
  void finish();
  // After finish(): copies the tokens [begin, tokens()) to another row and finishes that one; cut() then removes them
  // here. Both may be repeated after a kill.
  void copy_tail(int64_t begin, ShardRow& to) const;
  void cut(int64_t begin);

  int64_t tokens() const { return tokens_; }
  int64_t documents() const { return documents_; }
  int64_t last_document() const { return last_document_; }  // position of the first token of the last document
  void set_documents(int64_t n) { documents_ = n; }
  Json report() const { return {{"documents", documents_}, {"tokens", tokens_}, {"shards", shards_}}; }

 private:
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  std::optional<int64_t> number_of(std::string_view file) const;  // number of this row's shard `file`, finished or not
  void finish_shard();

  std::string folder_, prefix_, name_;
  TokenWidth width_;
  int64_t shard_tokens_;
  std::unique_ptr<ShardWriter> shard_;
  Json shards_ = Json::array();
  int64_t tokens_ = 0, documents_ = 0, last_document_ = 0;
};

}  // namespace triad
