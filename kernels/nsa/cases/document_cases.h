// NSA cases on packed rows: constants that hold the document tables, and lists of the documents' blocks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/nsa/cases/nsa_cases.h"
#include "kernels/nsa/document_tables.h"

namespace triad {

// The tables for B rows of T tokens, in host memory.
struct CaseDocuments {
  int64_t T = 0, ids = 0;
  std::vector<int32_t> begin, end, first_block, block_begin;

  // bounds: document bounds in the B*T tokens; the end may be padded with B*T, which leaves block ids unused.
  CaseDocuments(const std::vector<int32_t>& bounds, int64_t B, int64_t T, int64_t l_sel)
      : T(T), ids(block_ids(T, l_sel, static_cast<int64_t>(bounds.size()) - 1)) {
    begin.resize(static_cast<size_t>(B * T)), end = first_block = begin;
    block_begin.resize(static_cast<size_t>(B * ids), static_cast<int32_t>(T));
    const DocumentTableWriter writer{begin.data(),
                                     end.data(),
                                     first_block.data(),
                                     block_begin.data(),
                                     bounds.data(),
                                     static_cast<int64_t>(bounds.size()),
                                     T,
                                     ids,
                                     l_sel};
    for (int64_t token = 0; token < B * T; ++token) writer.write(token);
  }
};

// As random_block_lists, for packed rows: the entries are block ids, all in the token's own document.
inline std::vector<double> random_block_lists(uint64_t seed, const CaseDocuments& documents, int64_t Hkv, int64_t n,
                                              int64_t l_sel, bool short_lists) {
  std::vector<double> lists;
  for (size_t token = 0; token < documents.begin.size(); ++token) {
    const auto t = static_cast<int64_t>(token) % documents.T;
    if (t != documents.begin[token]) continue;
    const std::vector<double> document_lists =
        random_block_lists(seed + token, 1, documents.end[token] - t, Hkv, n, l_sel, short_lists);
    for (const double block : document_lists) lists.push_back(block < 0 ? -1 : block + documents.first_block[token]);
  }
  return lists;
}

// The tables for a case's packed rows; absent if its rows are not packed.
inline Documents documents_of(const Args& a) {
  return {a["document begin"], a["document end"], a["document first_block"], a["document block_begin"]};
}

// The case on packed rows. Its calls must pass documents_of(args). Constant lists become lists of the documents'
// blocks. Packed cases are not timed.
inline OpCase packed(OpCase c, const std::vector<int32_t>& bounds, int64_t l_sel, bool short_lists = false) {
  const auto lists = std::ranges::find(c.args, "block_index", &Arg::name);
  const Shape shape = lists == c.args.end() ? c.args.front().shape : lists->shape;  // [B,T,...]
  const int64_t B = shape[0], T = shape[1];
  const CaseDocuments documents(bounds, B, T, l_sel);
  if (lists != c.args.end() && lists->role == ArgRole::constant)
    lists->fill_all = [=, Hkv = shape[2], n = shape[3]](uint64_t seed) {
      return random_block_lists(seed, documents, Hkv, n, l_sel, short_lists);
    };
  const auto add = [&](std::string name, int64_t cols, const std::vector<int32_t>& values) {
    const auto fill = [values](int64_t i, uint64_t) { return static_cast<double>(values[static_cast<size_t>(i)]); };
    c.args.push_back(
        {.name = std::move(name), .role = ArgRole::constant, .shape = {B, cols}, .type = ArgType::i32, .fill = fill});
  };
  add("document begin", T, documents.begin);
  add("document end", T, documents.end);
  add("document first_block", T, documents.first_block);
  add("document block_begin", documents.ids, documents.block_begin);
  c.forward_flops = c.forward_bytes = c.backward_flops = c.backward_bytes = 0;
  c.forward_written = c.backward_written = OpCase::kHalf;
  return c;
}

// A case for GPU routes, too large for the tests on the CPU.
inline OpCase gpu_sized(OpCase c) {
  c.cpu = false;
  return c;
}

// Bounds that the cases share.
inline const std::vector<int32_t> kSingleTokens = {0, 1, 2, 3}, kMixed = {0, 33, 64, 65, 127},
                                  kMixedPadded = {0, 33, 64, 65, 127, 127, 127, 127},
                                  kTwoRows = {0, 33, 64, 65, 127, 177, 254}, kTwoLong = {0, 781, 2048};

// `count` documents, `length` tokens each.
inline std::vector<int32_t> equal_documents(int64_t count, int64_t length) {
  std::vector<int32_t> bounds;
  for (int64_t i = 0; i <= count; ++i) bounds.push_back(static_cast<int32_t>(i * length));
  return bounds;
}

}  // namespace triad
