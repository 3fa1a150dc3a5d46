// Forward for the branches and dense attention on Hopper: what each kernel supports, and its launcher. All take bf16
// and heads (dk, dv) = (64, 64), (128, 128) and (192, 128). `supports` and `pays` are pure functions of the problem.
#pragma once
#include <functional>

#include "kernels/nsa/gate.h"
#include "kernels/nsa/gpu/branch.cuh"

namespace triad::cuda {

// The window branch, the compressed branch and dense attention (nsa/sm90/forward_range.cu).
bool forward_sm90_supports(const AttendOut&, const AttendIn&);
void forward_range_sm90(Context&, const char* op, const AttendOut&, const AttendIn&, const KeyRange&);

// Some selected branch launchers have these arguments, which may be nullptr:
//   combine    the kernel also adds up the three branches' gated outputs (nsa/gate.h);
//   elsewhere  says which tokens the kernel must not compute, because another kernel writes their o and lse. The GPU
//              chooses these tokens.
struct KvStationaryShare;

// The forward with a shared KV tile and a mask per row (nsa/sm90/shared_tile.cu), for up to 1,024 blocks (896 in packed
// rows with 64-key blocks). long_documents_elsewhere: packed rows may have more blocks, if other kernels compute the
// documents with more than shared_tile_longest() tokens.
bool shared_tile_supports(const AttendOut&, const AttendIn&, int64_t l_sel, bool long_documents_elsewhere = false);
int64_t shared_tile_longest(const AttendIn&, int64_t l_sel);
void forward_shared_tile(Context&, const char* op, const AttendOut&, const AttendIn&, const SelectedKeys&,
                         const CombineAlong* combine, const KvStationaryShare* elsewhere = nullptr);

// The query-stationary forward (nsa/sm90/query_stationary.cu), for groups with many heads and any number of blocks.
bool query_stationary_supports(const AttendOut&, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
bool query_stationary_pays(const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
void forward_query_stationary(Context&, const char* op, const AttendOut&, const AttendIn&,
                              const ConstTensor& block_index, int64_t l_sel, const CombineAlong* combine,
                              const KvStationaryShare* elsewhere = nullptr);

// The forward with resident rows (nsa/sm90/resident_rows.cu). It supports head widths 64 and 128, groups with up to 8
// heads, lists with up to 64 entries, and sequences with up to 512 blocks of 64 keys; it doesn't support packed rows.
// It pays if a sequence has enough blocks for each list entry, 4 to 8 depending on the heads, but not so many that only
// a few rows in a tile list the same block.
bool resident_rows_supports(const AttendOut&, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
bool resident_rows_pays(const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
void forward_resident_rows(Context&, const char* op, const AttendOut&, const AttendIn&, const SelectedKeys&,
                           const CombineAlong* combine);

// The KV-stationary forward, split-KV and merge (nsa/sm90/kv_stationary.cu), for long sequences whose neighbouring
// tokens list different blocks. The GPU compares the lists. For lists that are alike, forward_alike(on, elsewhere) has
// to queue on stream `on` another kernel, which computes o and lse for all other tokens. longest: documents with more
// tokens are computed here even if their lists are alike.
using ForwardAlike = std::function<void(Context& on, const KvStationaryShare& elsewhere)>;
bool kv_stationary_supports(const AttendOut&, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
bool kv_stationary_pays(const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
void forward_kv_stationary(Context&, const char* op, const AttendOut&, const AttendIn&, const SelectedKeys&,
                           int64_t longest, const ForwardAlike& forward_alike, const CombineAlong* combine);

}  // namespace triad::cuda
