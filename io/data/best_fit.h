// Packs whole documents into rows of T tokens, by best fit among a thousand documents.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/data/rows.h"

namespace triad {

// Consecutive tokens of a source: a document, or a part of one.
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
  std::vector<std::vector<Piece>> rows;  // the pieces of each row, one after the other from the row's first token
  int64_t cut = 0, dropped = 0;          // documents that were cut to fill a row, and the tokens that they lost
  int64_t padded = 0;                    // tokens at the rows' ends without a document
};

// Packs documents of at most seq_len tokens: of the first `buffered` documents that are left, the longest that fits
// into the rest of the row is next (of equal ones the earliest). If none fits, the shortest fills the row and loses its
// rest. A row has padding only if it is closed, or if no documents are left.
Packed pack_best_fit(std::span<const Piece> documents, const PackingLimits&);

// The value of max_documents that data.max_documents = 0 means.
int64_t default_max_documents(int64_t seq_len);

// Rows of packed documents. An epoch deals the documents in shuffled order into groups that are large against a row,
// each group is packed on its own, and its rows are shuffled. So a row is a pure function of the seed and its number.
// How many rows a group has is known only once it is packed, so to find a row, the groups before it are packed by their
// lengths alone, from RowOptions::known on. Documents of more than T tokens are cut into
// pieces of T tokens before, which count as documents.
//
// The target of each token is the next token of its document, the last token's is the next document's separator. If
// the separator is a document's last token, that has target -1; so has the token before one that the mask excludes.
// Padding is separators with target -1, in as many documents of their own as the row may still have, at least one: a
// row has at most max_documents + 1.
std::unique_ptr<RowSource> best_fit_rows(std::shared_ptr<const TokenSource>, const RowOptions&);

// The first epoch of these rows.
struct PackingStats {
  int64_t rows = 0, pieces = 0, cut = 0, dropped = 0, padded = 0;
  int64_t cut_tokens = 0;  // RowDocuments::cut of all rows
  // [T+1]: by length, the number of pieces, and of documents that are padding.
  std::vector<int64_t> parts = {}, paddings = {};
};
PackingStats measure_best_fit(const TokenSource&, const RowOptions&);

}  // namespace triad
