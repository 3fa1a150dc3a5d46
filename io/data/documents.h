// Where a token source's documents begin, and which ones a row of tokens holds.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace triad {

// Whether the end-of-text token that separates documents is a document's first token or its last.
enum class Separator { first, last };

// A token source's documents: document i is the tokens [begins[i], begins[i+1]), the last one ends at `size`.
struct DocumentIndex {
  std::vector<int64_t> begins;  // ascending; the first is 0
  int64_t size = 0;             // tokens in the source
  Separator separator = Separator::first;
  int32_t eot = 0;  // the separator's token
  // The target for the source's last token: the next document's separator, or -1 if none follows or it is not learned.
  int32_t after_end = -1;

  int64_t count() const { return static_cast<int64_t>(begins.size()); }
  int64_t end(int64_t document) const { return document + 1 < count() ? begins[document + 1] : size; }
  int64_t length(int64_t document) const { return end(document) - begins[document]; }
  // Whether a document begins at the position.
  bool begins_at(int64_t position) const { return !begins_in(position, position + 1).empty(); }
  // The documents that begin at the positions [begin, end): as a range of `begins`.
  std::span<const int64_t> begins_in(int64_t begin, int64_t end) const;
  // The documents in this source's tokens [begin, end), as an index for those tokens alone.
  DocumentIndex part(int64_t begin, int64_t end) const;
  uint32_t checksum() const;  // CRC-32 of `begins`
};

// The index for a source in which `marks` are the separators' positions, ascending. Tokens before the first separator,
// or after the last one if separators are documents' last tokens, are a document too.
DocumentIndex index_documents(std::vector<int64_t> marks, int64_t size, Separator, int32_t eot);

// How T-token rows divide the documents. Row i is the tokens i*T and up; there are count_sequences() rows.
struct RowDivision {
  int64_t most = 0;                 // most documents in a row
  int64_t fullest = 0;              // first row that has as many
  int64_t documents = 0;            // document counts, summed over rows
  int64_t cut = 0;                  // documents that continue in another row
  int64_t cut_tokens = 0;           // tokens whose document began in an earlier row
  std::vector<int64_t> parts = {};  // [T+1]: by length, how many documents, or parts of documents, the rows hold
};
RowDivision divide_rows(const DocumentIndex&, int64_t rows, int64_t seq_len);

}  // namespace triad
