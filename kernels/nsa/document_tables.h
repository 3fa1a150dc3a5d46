// Fills packed rows' tables (common/documents.h), which say where each document begins and ends, from the document
// bounds (cu_seqlens).
#pragma once
#include "engine/context.h"
#include "kernels/common/documents.h"

namespace triad {

// The tables as outputs; Documents, to which they convert, has them as inputs.
struct DocumentTables {
  Tensor begin, end, first_block;  // [B,T] i32
  Tensor block_begin;              // [B,ids] i32, ids = block_ids(T, l_sel, most documents in a row)
  operator Documents() const { return {begin, end, first_block, block_begin}; }
};

// tables overwritten  <-  bounds [n] i32: document i is [bounds[i], bounds[i+1]) among all rows' B*T tokens. bounds
// must satisfy check_bounds (nsa/document_bounds.h), except that it may be padded at the end with B*T.
void nsa_document_tables(Context&, const DocumentTables&, ConstTensor bounds, int64_t l_sel);

// to overwritten  <-  the tables `from`, for the tokens [first, first + T) alone, T being the length of `to`: counted
// from token `first`, with document ends beyond it cut off. A document that begins earlier begins at a negative token.
// Both have the same ids.
void nsa_cut_documents(Context&, const DocumentTables& to, const Documents& from, int64_t first);
// The same for the tokens [first, end), with tables allocated in a scope; no tables if `from` has none.
Documents cut_documents(Context&, Scratch::Scope&, const Documents& from, int64_t first, int64_t end);

namespace cuda {
void nsa_document_tables(Context&, const DocumentTables&, ConstTensor bounds, int64_t l_sel);
void nsa_cut_documents(Context&, const DocumentTables& to, const Documents& from, int64_t first);
}  // namespace cuda

// Returns the last index i in [0, n) with bounds[i] <= x, given ascending bounds and bounds[0] <= x. For CPU and GPU.
constexpr int64_t last_bound(const int32_t* bounds, int64_t n, int64_t x) {
  int64_t low = 0, high = n;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (bounds[middle] <= x ? low : high) = middle;
  }
  return low;
}

// write(token) writes one token's entries, counted over all rows, to the tables [B,T]; if a selection block begins at
// the token, also the block's block_begin entry.
struct DocumentTableWriter {
  int32_t *begin, *end, *first_block, *block_begin;  // the tables, contiguous
  const int32_t* bounds;
  int64_t n, T, ids, l_sel;  // bound count; tokens per row; block ids per row; tokens per selection block

  constexpr void write(int64_t token) const {
    const int64_t row = token / T * T, i = last_bound(bounds, n, token);
    const int64_t s = bounds[i] - row, number = i - last_bound(bounds, n, row), t = token - row;
    const int64_t first = s / l_sel + number;
    begin[token] = static_cast<int32_t>(s);
    end[token] = static_cast<int32_t>(bounds[i + 1] - row);
    first_block[token] = static_cast<int32_t>(first);
    if ((t - s) % l_sel == 0) block_begin[token / T * ids + first + (t - s) / l_sel] = static_cast<int32_t>(t);
  }
};

inline DocumentTableWriter table_writer(const DocumentTables& tables, const ConstTensor& bounds, int64_t l_sel) {
  return {tables.begin.ptr<int32_t>(),
          tables.end.ptr<int32_t>(),
          tables.first_block.ptr<int32_t>(),
          tables.block_begin.ptr<int32_t>(),
          bounds.ptr<int32_t>(),
          bounds.size(0),
          tables.begin.size(1),
          tables.block_begin.size(1),
          l_sel};
}

// write(i) writes the entries for `to`'s token i, and for block id i; both are counted over all rows.
struct DocumentCutter {
  int32_t *begin, *end, *first_block, *block_begin;
  const int32_t *from_begin, *from_end, *from_first_block, *from_block_begin;
  int64_t B, T, from_T, ids, first;

  constexpr int32_t cut(int32_t token) const {
    const int64_t at = token - first;
    return static_cast<int32_t>(at < T ? at : T);
  }
  constexpr void write(int64_t i) const {
    if (i < B * T) {
      const int64_t from = i / T * from_T + first + i % T;
      begin[i] = cut(from_begin[from]);
      end[i] = cut(from_end[from]);
      first_block[i] = from_first_block[from];
    }
    if (i < B * ids) block_begin[i] = cut(from_block_begin[i]);
  }
  constexpr int64_t count() const { return B * (T > ids ? T : ids); }
};

inline DocumentCutter document_cutter(const DocumentTables& to, const Documents& from, int64_t first) {
  return {to.begin.ptr<int32_t>(),
          to.end.ptr<int32_t>(),
          to.first_block.ptr<int32_t>(),
          to.block_begin.ptr<int32_t>(),
          from.begin.ptr<int32_t>(),
          from.end.ptr<int32_t>(),
          from.first_block.ptr<int32_t>(),
          from.block_begin.ptr<int32_t>(),
          to.begin.size(0),
          to.begin.size(1),
          from.begin.size(1),
          to.block_begin.size(1),
          first};
}

}  // namespace triad
