// Packs whole documents into T-token rows, by best fit among a thousand documents.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/data/rows.h"

namespace triad {

// Consecutive tokens in a source: a document, or a part of one.
struct Piece {
  int64_t begin = 0, length = 0;
  int64_t dropped = 0;  // tokens that it lost at its end to fill a row
};

struct PackingLimits {
  int64_t seq_len = 0;
  int64_t max_documents = 0;  // a row that holds as many is closed
  int64_t buffered = 1000;    // documents among which the next one is chosen
};

struct Packed {
  std::vector<std::vector<Piece>> rows;  // each row's pieces, one after the other from the row's first token
  int64_t cut = 0, dropped = 0;          // documents that were cut to fill a row, and the tokens that they lost
  int64_t padded = 0;                    // tokens at the rows' ends without a document
};

// Packs documents with at most seq_len tokens: among the first `buffered` documents left, the longest that fits into
// the rest of the row is next (in a tie, the earliest). If none fits, the shortest fills the row and loses its rest. A
// row has padding only if it is closed, or if no documents are left.
Packed pack_best_fit(std::span<const Piece> documents, const PackingLimits&);

// The limit that data.max_documents = 0 stands for.
int64_t default_max_documents(int64_t seq_len);

// Rows with packed documents. An epoch deals the documents in shuffled order into groups much larger than a row, each
// group is packed on its own, and its rows are shuffled. So a row is a pure function of the seed and its number. How
// many rows a group has is known only once it is packed, so to find a row, the groups before it are packed by their
// lengths alone, from RowOptions::known on. Documents with more than T tokens are first cut into T-token pieces, which
// count as documents.
//
// Each token's target is the document's next token, the last token's is the next document's separator. If the separator
// is a document's last token, that has target -1; so has the token before one that the mask excludes. Padding is
// separators with target -1, in as many separate documents as the row may still have, at least one: a row has at most
// max_documents + 1.
std::unique_ptr<RowSource> best_fit_rows(std::shared_ptr<const TokenSource>, const RowOptions&);

// Statistics of these rows' first epoch.
struct PackingStats {
  int64_t rows = 0, pieces = 0, cut = 0, dropped = 0, padded = 0;
  int64_t cut_tokens = 0;  // RowDocuments::cut over all rows
  // [T+1]: by length, how many pieces there are, and how many padding documents.
  std::vector<int64_t> parts = {}, paddings = {};
};
PackingStats measure_best_fit(const TokenSource&, const RowOptions&);

}  // namespace triad
