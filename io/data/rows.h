// A run's training rows, T tokens and T targets each, in training order, with the documents they hold.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/data/dataset.h"

namespace triad {

// How rows hold documents. Zeros for rows that do not depend on documents.
struct RowDocuments {
  int64_t documents = 0;  // documents, or parts of them, padding not included
  int64_t padded = 0;     // padding tokens
  // Tokens that a cut separates from their document: those that a row holds without the document's beginning, and those
  // that were dropped to fill the row.
  int64_t cut = 0;
  void add(const RowDocuments& o) { documents += o.documents, padded += o.padded, cut += o.cut; }
};

// A row in a batch. The spans have the same size.
struct Row {
  std::span<int32_t> tokens, targets;
  std::vector<int32_t> begins = {};  // where the row's documents begin, from 0; empty if documents are not separated
  RowDocuments documents = {};
};

// Where a group of packed rows begins (best_fit.h): its number, and its first row's. From there the later groups are
// found without those before it.
struct RowGroup {
  int64_t group = 0, first_row = 0;
};
using RowGroups = std::vector<RowGroup>;  // one for each component of a mixture (mixture.h); empty: rows have none

// How documents make rows.
enum class Packing {
  unset,     // whatever the data suggests (train/run/data_source.h)
  stream,    // rows are consecutive source tokens, which cut documents at their ends (stream_rows)
  best_fit,  // rows hold whole documents as far as possible (best_fit.h)
};

struct RowOptions {
  int64_t seq_len = 0;
  // stream: what is ordered are blocks with this many tokens, a multiple of seq_len, and a block's rows follow one
  // another. So a run whose rows change their length reads no token twice in an epoch. 0: seq_len.
  int64_t block = 0;
  Packing packing = Packing::stream;
  int64_t max_documents = 0;  // best_fit: a row that holds as many is closed
  uint64_t seed = 0;          // shuffle seed
  bool within = false;        // separate documents: attention stays within a document
  RowGroups known = {};       // best_fit: groups that an earlier run with the same rows has found; empty: none
};

// A run's rows number 0, 1, .., without end: epoch after epoch. A row is a pure function of the options and its number.
// Not thread-safe.
class RowSource {
 public:
  virtual ~RowSource() = default;
  virtual void read(int64_t number, Row& row) = 0;  // overwrites the row
  // How many targets other than -1 a row has.
  virtual int64_t count_targets(int64_t number) = 0;
  // How many padded tokens a row ends with.
  virtual int64_t count_padding(int64_t /*number*/) { return 0; }
  // The groups of a row, and of the other components' next rows.
  virtual RowGroups groups_of(int64_t /*number*/) { return {}; }
  // How many groups are packed so far. Any thread may call it while another one reads: it tells that a search for the
  // first row, which may take long, goes on.
  virtual int64_t groups_packed() const { return 0; }
};

// Rows that begin at the multiples of T in the source, in shuffled order (by block, with RowOptions::block). A document
// that a row's end cuts continues in the next row. A row's last target is the next token.
std::unique_ptr<RowSource> stream_rows(std::shared_ptr<const TokenSource>, const RowOptions&);

// How many rows with T+1 tokens a source has. They begin at multiples of T, so that every token but the first is a
// target once per epoch. Throws an Error with the numbers if there is not one row.
int64_t count_sequences(const TokenSource&, int64_t seq_len);

// The position, in rows, of a run's k-th stream_rows row (k = 0, 1, ...). It belongs to epoch k / n_sequences, whose
// order is a permutation keyed by (seed, epoch).
int64_t sequence_position(int64_t k, int64_t n_sequences, uint64_t seed);

// Reads the row that begins at token `begin`; a token that the source's mask excludes is no target. within: as in
// RowOptions; a separator that is a document's last token then has target -1.
void read_stream_row(const TokenSource&, int64_t begin, bool within, Row&);
// How many targets other than -1 that row has.
int64_t count_stream_targets(const TokenSource&, int64_t begin, int64_t seq_len, bool within);

// Sets each target to -1 whose token is not learned; targets[i] is token first + i in the mask's source.
void apply_mask(const MaskView&, int64_t first, std::span<int32_t> targets);

}  // namespace triad
