// Device view of the packed-row tables (common/documents.h).
#pragma once
#include "engine/check.h"
#include "kernels/common/documents.h"

namespace triad::cuda {

// All sequences' tables; row(b) has sequence b's. Without documents every row is one document of T tokens.
struct DocumentView {
  const int32_t *begins, *ends, *first_blocks, *block_begins;
  int T, ids;
  __device__ __forceinline__ DocumentRow<int> row(int b) const {
    if (begins == nullptr) return {.T = T};
    const int64_t first = int64_t{b} * T;
    return {begins + first, ends + first, first_blocks + first, block_begins + int64_t{b} * ids, T};
  }
};
inline DocumentView document_view(const Documents& documents, int64_t T) {
  if (documents.empty()) return {.T = static_cast<int>(T)};
  for (const ConstTensor& table : {documents.begin, documents.end, documents.first_block, documents.block_begin})
    TRIAD_CHECK(table.contiguous(), "documents: a table is strided: {}", table.str());
  return {documents.begin.ptr<int32_t>(),       documents.end.ptr<int32_t>(), documents.first_block.ptr<int32_t>(),
          documents.block_begin.ptr<int32_t>(), static_cast<int>(T),          static_cast<int>(documents.ids())};
}

}  // namespace triad::cuda
