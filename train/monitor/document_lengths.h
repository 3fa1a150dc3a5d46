// document_lengths.json: how long the documents of the training data are, and the parts of them that rows hold.
#pragma once
#include "io/data/documents.h"
#include "io/json_config.h"
#include "model/flops.h"

namespace triad {

inline constexpr const char* kDocumentLengths = "document_lengths.json";

// {schema, documents, tokens, longest, lengths, row_parts}. lengths: the number of documents, and of their tokens, by
// length, as [{from, to, documents, tokens}, ..] for the lengths from <= length < to. Bounds are powers of two, and no
// range between the shortest and the longest is left out. row_parts: the same of the documents, or parts of them, that
// training rows hold; null if rows do not depend on documents.
Json document_lengths(const DocumentIndex&, const DocumentMix& row_parts);

}  // namespace triad
