// The shards that one `triad data` call writes: two token streams, train and val, divided into files with a chosen
// size. Also the state with which a later call resumes after the process was killed.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/data/corpus.h"
#include "io/data/permutation.h"
#include "io/data/shards.h"
#include "io/json_config.h"

namespace triad {

// Chooses validation documents in a stream whose length is not known yet. From each 1/val_fraction consecutive
// documents, the seed chooses one, but never the very first document. So n * val_fraction documents are chosen among n,
// +- 1.
class HeldOutStream {
 public:
  HeldOutStream(double val_fraction, uint64_t seed);
  bool operator()(int64_t document) const;

 private:
  int64_t first_of(int64_t stratum) const;

  double fraction_;
  Philox random_;
};

// ShardRow: writes the files FOLDER/PREFIX_000000.bin and so on, with exactly shard_tokens tokens each, except for the
// last one. A document may span two files.
class ShardRow {
 public:
  ShardRow(std::string folder, std::string prefix, const ShardLayout&, int64_t shard_tokens);
  // Changes the layout; before the first token.
  void lay_out(const ShardLayout& layout) { layout_ = layout; }
  // Continues from the state that pause() returned; files with this prefix that were written later are removed. cut: as
  // in cut(), which may have begun; -1: none. Throws an Error that names the shard if the state names a file that is
  // not this row's next one, or if a file's content has changed since.
  void resume(const Json& paused, int64_t cut = -1);
  // learned: a byte for each token, 1 if it is learned; empty: all are. Shards without a mask ignore it.
  void append(std::span<const int32_t> tokens, std::span<const uint8_t> learned = {});
  // Appends the separator, which is learned if the token before it is.
  void begin_document(int32_t eot);
  Json pause();
  void finish();
  // Call after finish(): copies the tokens [begin, tokens()) to another row and finishes that row; cut() then removes
  // them from this one. Both may be repeated after the process was killed.
  void copy_tail(int64_t begin, ShardRow& to) const;
  void cut(int64_t begin);

  int64_t tokens() const { return tokens_; }
  int64_t documents() const { return documents_; }
  // Where the row's last document begins.
  int64_t last_document() const { return last_document_; }
  void set_documents(int64_t n) { documents_ = n; }
  Json report() const;  // split's entry for the manifest

 private:
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  // The file name of the row's shard `number`.
  std::string name_of(size_t number) const;
  void check_finished(const Json& shards, int64_t cut) const;
  // The number of the shard called `file` in this row, finished or not.
  std::optional<int64_t> number_of(std::string_view file) const;
  void finish_shard();

  std::string folder_, prefix_, name_;
  ShardLayout layout_;
  int64_t shard_tokens_;
  std::unique_ptr<ShardWriter> shard_;
  Json shards_ = Json::array();
  int64_t tokens_ = 0, documents_ = 0, last_document_ = 0;
  bool last_learned_ = true;  // whether the last token is learned
};

}  // namespace triad
