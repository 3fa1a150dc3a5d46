// Fills packed rows' tables on the GPU, once per step. One kernel sets every block_begin entry to T, which marks an id
// without a block. The other has one thread per token, which finds its document by bisecting the bounds and writes the
// entries.
#include "kernels/nsa/document_tables.h"

#include "kernels/common/launch.cuh"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) clear_blocks_kernel(int32_t* block_begin, int64_t count, int32_t T) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) block_begin[i] = T;
}

__global__ void __launch_bounds__(kThreads) document_tables_kernel(const DocumentTableWriter writer, int64_t tokens) {
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token < tokens) writer.write(token);
}

__global__ void __launch_bounds__(kThreads) cut_documents_kernel(const DocumentCutter cutter) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < cutter.count()) cutter.write(i);
}

}  // namespace

void nsa_document_tables(Context& ctx, const DocumentTables& tables, ConstTensor bounds, int64_t l_sel) {
  const int64_t B = tables.begin.size(0), T = tables.begin.size(1), ids = tables.block_begin.size(1);
  const DocumentTableWriter writer = table_writer(tables, bounds, l_sel);
  launch(ctx, "clear_blocks", clear_blocks_kernel, dim3(ceil_div(B * ids, kThreads)), dim3(kThreads), 0,
         writer.block_begin, B * ids, static_cast<int32_t>(T));
  launch(ctx, "document_tables", document_tables_kernel, dim3(ceil_div(B * T, kThreads)), dim3(kThreads), 0, writer,
         B * T);
}

void nsa_cut_documents(Context& ctx, const DocumentTables& to, const Documents& from, int64_t first) {
  const DocumentCutter cutter = document_cutter(to, from, first);
  launch(ctx, "cut_documents", cut_documents_kernel, dim3(ceil_div(cutter.count(), kThreads)), dim3(kThreads), 0,
         cutter);
}

}  // namespace triad::cuda
