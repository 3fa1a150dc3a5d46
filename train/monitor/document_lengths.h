// document_lengths.json: how long the training data's documents are, and the parts that rows hold.
#pragma once
#include <vector>

#include "io/data/documents.h"
#include "io/json_config.h"
#include "model/flops.h"

namespace triad {

inline constexpr const char* kDocumentLengths = "document_lengths.json";

// {schema, documents, tokens, longest, lengths, row_parts}. lengths: how many documents and tokens there are by length,
// as [{from, to, documents, tokens}, ..] for the lengths from <= length < to. Bounds are powers of two, and no range
// between the shortest and the longest is left out. row_parts: the same for documents, or parts of documents, that
// training rows hold; null if rows do not depend on documents. The documents of all indices count.
Json document_lengths(const std::vector<const DocumentIndex*>&, const DocumentMix& row_parts);

}  // namespace triad
