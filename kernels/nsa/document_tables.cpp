// Packed rows' tables: shape checks, dispatch, and the CPU loop.
#include "kernels/nsa/document_tables.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

void nsa_document_tables(Context& ctx, const DocumentTables& tables, ConstTensor bounds, int64_t l_sel) {
  const OpScope op_scope(ctx, "nsa_document_tables");
  TRIAD_CHECK(tables.begin.rank == 2 && bounds.rank == 1 && bounds.size(0) >= 2,
              "nsa_document_tables: {} for bounds {}", tables.begin.str(), bounds.str());
  const int64_t B = tables.begin.size(0), T = tables.begin.size(1);
  for (const Tensor& table : {tables.begin, tables.end, tables.first_block})
    check_tensor("nsa_document_tables: a table of tokens", table, {B, T}, DType::i32);
  check_tensor("nsa_document_tables: block_begin", tables.block_begin, {B, tables.block_begin.size(1)}, DType::i32);
  check_tensor("nsa_document_tables: bounds", bounds, {bounds.size(0)}, DType::i32);
  TRIAD_CHECK(l_sel >= 1 && tables.block_begin.size(1) >= block_ids(T, l_sel, 1),
              "nsa_document_tables: {} ids for rows of {} tokens in blocks of {}", tables.block_begin.size(1), T,
              l_sel);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_document_tables(ctx, tables, bounds, l_sel);
  }
  if (ctx.planning) return;
  const int64_t ids = tables.block_begin.size(1);
  const DocumentTableWriter writer = table_writer(tables, bounds, l_sel);
  std::fill_n(writer.block_begin, B * ids, static_cast<int32_t>(T));
  parallel_for(ctx, B * T, [&](int64_t token) { writer.write(token); });
}

void nsa_cut_documents(Context& ctx, const DocumentTables& to, const Documents& from, int64_t first) {
  const OpScope op_scope(ctx, "nsa_cut_documents");
  const int64_t B = from.begin.size(0), T = to.begin.size(1);
  TRIAD_CHECK(first >= 0 && first + T <= from.begin.size(1), "nsa_cut_documents: tokens {} to {} of {}", first,
              first + T, from.begin.str());
  for (const Tensor& table : {to.begin, to.end, to.first_block})
    check_tensor("nsa_cut_documents: a table of tokens", table, {B, T}, DType::i32);
  check_tensor("nsa_cut_documents: block_begin", to.block_begin, from.block_begin.shape(), DType::i32);
  for (const ConstTensor& table : {from.begin, from.end, from.first_block, from.block_begin})
    TRIAD_CHECK(table.contiguous(), "nsa_cut_documents: a table is strided: {}", table.str());
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_cut_documents(ctx, to, from, first);
  }
  if (ctx.planning) return;
  const DocumentCutter cutter = document_cutter(to, from, first);
  parallel_for(ctx, cutter.count(), [&](int64_t i) { cutter.write(i); });
}

Documents cut_documents(Context& ctx, Scratch::Scope& scope, const Documents& from, int64_t first, int64_t end) {
  if (from.empty()) return {};
  const int64_t B = from.begin.size(0);
  const auto alloc = [&](int64_t entries) { return scope.alloc(DType::i32, {B, entries}, "documents of a part"); };
  const int64_t tokens = end - first;
  const DocumentTables tables{alloc(tokens), alloc(tokens), alloc(tokens), alloc(from.ids())};
  nsa_cut_documents(ctx, tables, from, first);
  return tables;
}

}  // namespace triad
