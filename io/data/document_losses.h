// The loss by position in the document, and by document, for `triad eval`.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "io/data/documents.h"
#include "io/json_config.h"

namespace triad {

// Losses of a source's predictions, evaluated in rows of seq_len tokens, which begin at multiples. A position in a
// document counts the document's tokens before it in the row, because the model sees no others: a document that goes on
// in the next row begins there anew.
class DocumentLosses {
 public:
  DocumentLosses(const DocumentIndex& index, int64_t seq_len) : index_(index), seq_len_(seq_len) {}
  // Adds the loss for the prediction after the token at `position` in the source. Positions ascend.
  void add(int64_t position, double loss);

  Json json() const;  // {documents, mean_loss, by_position: [{from, to, positions, loss, ppl}]}; to: null for the last
  std::string table() const;  // a line each
  // CSV with a row for each document that has a prediction: its number in the source from 0, its first token there, its
  // length, how many predictions it has, their mean loss and perplexity.
  std::string csv() const;

 private:
  struct Sum {
    double loss = 0;
    int64_t positions = 0;
    double mean() const { return loss / static_cast<double>(positions); }
  };
  struct OfDocument : Sum {
    int64_t document = 0;
  };
  // A position range ends at each of these; the last range has no end.
  static constexpr std::array<int64_t, 4> kEnds = {2 << 10, 8 << 10, 32 << 10, 128 << 10};
  // The documents' mean losses, averaged over documents.
  double mean_over_documents() const;

  const DocumentIndex& index_;
  int64_t seq_len_;
  int64_t document_ = 0;  // document that holds the last position
  std::array<Sum, kEnds.size() + 1> by_position_;
  std::vector<OfDocument> by_document_;  // ascending
};

// The document bounds in B rows of T tokens that hold the source's tokens [begin, begin + n), the rest being one
// document a row.
std::vector<int32_t> bounds_of_rows(const DocumentIndex&, int64_t begin, int64_t n, int64_t B, int64_t T);

}  // namespace triad
