// Packed rows: a row of T tokens holds several documents, one after the other. Attention, positions and selection stay
// within a document, so its result is the same as if it were alone. Kernels read four tables in device memory, which
// nsa/document_tables.h fills from the document bounds (cu_seqlens).
//
// A row's documents share one numbering for compressed keys and one for selection blocks, so kernels need no other
// document boundaries than the tables. For a document that begins at token s and is number i in its row:
//   compressed key c of the document is key floor(s/d) + c of the row (keys that no document uses are zeros),
//   selection block j of the document is block floor(s/l') + i + j of the row (its id).
// Both numberings ascend with the tokens, and no number is used twice.
#pragma once
#include <cstdint>

#include "engine/tensor.h"
#include "kernels/common/integer.h"

namespace triad {

// Which tokens of a row a call's tensors hold, if several ranks share each row (dist.context). In q, and in every
// tensor with one row per query, row i is the row's token(i): attention has consecutive queries, other ops may have two
// spans. Key and value row i is token first_key + i; compressed keys are always the whole row's. Document tables
// (nsa_cut_documents) begin at token first_key and count from it; attention's end with the last query, compression's
// with the last token in x. Layers and rope have tables for the whole row.
struct RowPart {
  int64_t first_query = 0, first_key = 0;
  int64_t tokens = 0;  // token count of the whole row; 0: the tensors hold the whole row
  // If split > 0: row `split` of q, and those after it, are the tokens from second_query on.
  int64_t split = 0, second_query = 0;

  constexpr bool whole() const { return tokens == 0; }
  // The whole row's token count, if one of the call's tensors has `rows` rows.
  constexpr int64_t tokens_or(int64_t rows) const { return whole() ? rows : tokens; }
  constexpr int64_t token(int64_t i) const {
    return split > 0 && i >= split ? second_query + i - split : first_query + i;
  }
  // Whether q's row i begins a span, so that the row before it does not hold the token before.
  constexpr bool begins(int64_t i) const { return i == 0 || (split > 0 && i == split); }
};

// The four packed-row tables, see above. Absent (empty()) if every row is one document.
struct Documents {
  ConstTensor begin, end;   // [B,T] i32: token t's document is the tokens [begin[t], end[t]) of its row
  ConstTensor first_block;  // [B,T] i32: id of the first selection block in token t's document
  ConstTensor block_begin;  // [B,ids] i32: each selection block's first token; T for an id without a block
  RowPart part = {};        // the tokens that the call's tensors hold, with or without tables

  bool empty() const { return begin.empty(); }
  int64_t ids() const { return block_begin.size(1); }
};

// The number of block ids in a row with T tokens and at most `documents` documents.
constexpr int64_t block_ids(int64_t T, int64_t l_sel, int64_t documents) { return ceil_div(T, l_sel) + documents - 1; }

// The number of compressed blocks, block c being the tokens [c*d, c*d + l), that end within the first `tokens` tokens.
template <class Int>
constexpr Int blocks_within(Int tokens, Int l, Int d) {
  return tokens < l ? 0 : (tokens - l) / d + 1;
}
// The same, at most `most` >= 0. (Taking the minimum of the other function's result would cost one more instruction.)
template <class Int>
constexpr Int blocks_within(Int tokens, Int l, Int d, Int most) {
  if (tokens < l) return 0;
  const Int blocks = (tokens - l) / d + 1;
  return blocks < most ? blocks : most;
}

// One row's tables, as pointers to host or device memory. Without tables (begins == nullptr) the row is one document
// with T tokens. Int: the integer type to compute in.
template <class Int>
struct DocumentRow {
  const int32_t *begins = nullptr, *ends = nullptr, *first_blocks = nullptr, *block_begins = nullptr;
  Int T = 0;

  constexpr bool packed() const { return begins != nullptr; }
  constexpr Int begin(Int t) const { return packed() ? begins[t] : 0; }
  constexpr Int end(Int t) const { return packed() ? ends[t] : T; }
  constexpr Int first_block(Int t) const { return packed() ? first_blocks[t] : 0; }
  constexpr Int block_begin(Int id, Int l_sel) const { return packed() ? block_begins[id] : id * l_sel; }
  // The id of token t's selection block.
  constexpr Int block_of(Int t, Int l_sel) const { return first_block(t) + (t - begin(t)) / l_sel; }
  // Selection block `id` contains the tokens [block_begin, block_end).
  constexpr Int block_end(Int id, Int l_sel) const {
    const Int first = block_begin(id, l_sel);
    if (first >= T) return first;
    const Int last = first + l_sel, stop = end(first);
    return last < stop ? last : stop;
  }
  // A token in the only document that can own compressed key c. A document that ends before token c*d + d - 1 has no
  // block with l tokens that begins at c*d or later, since l >= d.
  constexpr Int owner(Int c, Int d) const {
    const Int last = c * d + d - 1;
    return last < T ? last : T - 1;
  }
  // Compressed key c's first token, or -1 if the key belongs to no document.
  constexpr Int key_begin(Int c, Int l, Int d) const {
    if (!packed()) return c * d;
    const Int x = owner(c, d), s = begin(x);
    const Int first = s > c * d ? s : s + round_up(c * d - s, d);
    return first + l <= end(x) ? first : -1;
  }
  // Token t attends to the compressed keys [first_key, first_key + visible_keys).
  constexpr Int first_key(Int t, Int d) const { return packed() ? begins[t] / d : 0; }
  constexpr Int visible_keys(Int t, Int l, Int d) const { return blocks_within(t - begin(t) + 1, l, d); }
};

// Row b's tables, in host memory. T: the tables' token count.
inline DocumentRow<int64_t> host_row(const Documents& documents, int64_t b, int64_t T) {
  if (documents.empty()) return {.T = T};
  const auto at = [&](const ConstTensor& table) { return table.ptr<int32_t>() + b * table.stride[0]; };
  return {at(documents.begin), at(documents.end), at(documents.first_block), at(documents.block_begin), T};
}

}  // namespace triad
