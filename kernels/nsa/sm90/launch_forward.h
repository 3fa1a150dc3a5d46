// Forward of the branches and of dense attention on Hopper: what each kernel supports, and its launcher. All take bf16
// and heads (dk, dv) of (64, 64), (128, 128) and (192, 128). `supports` and `pays` are pure functions of the problem.
#pragma once
#include <functional>

#include "kernels/nsa/gate.h"
#include "kernels/nsa/gpu/branch.cuh"

namespace triad::cuda {

// The window branch, the compressed branch and dense attention (nsa/sm90/forward_range.cu).
bool forward_sm90_supports(const AttendOut&, const AttendIn&);
void forward_range_sm90(Context&, const char* op, const AttendOut&, const AttendIn&, const KeyRange&);

// The selected branch. combine, if not nullptr: the kernel also computes the gated sum of the branches, along with o
// (nsa/gate.h). unless, if not nullptr: the kernel returns at once if *unless, on the GPU, is not 0.

// The forward with a shared KV tile and a mask per row (nsa/sm90/shared_tile.cu), for up to 1,024 blocks.
bool shared_tile_supports(const AttendOut&, const AttendIn&, int64_t l_sel);
void forward_shared_tile(Context&, const char* op, const AttendOut&, const AttendIn&, const SelectedKeys&,
                         const CombineAlong* combine, const int* unless = nullptr);

// The query-stationary forward (nsa/sm90/query_stationary.cu), for groups of many heads and any number of blocks.
bool query_stationary_supports(const AttendOut&, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
bool query_stationary_pays(const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
void forward_query_stationary(Context&, const char* op, const AttendOut&, const AttendIn&,
                              const ConstTensor& block_index, int64_t l_sel, const CombineAlong* combine,
                              const int* unless = nullptr);

// The KV-stationary forward, split-KV and merge (nsa/sm90/kv_stationary.cu), for long sequences whose neighbouring
// tokens list different blocks. The GPU compares the lists. For lists that are alike, forward_alike(on, unless) has to
// queue on stream `on` another kernel, which computes o and lse unless *unless is not 0.
bool kv_stationary_supports(const AttendOut&, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
bool kv_stationary_pays(const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
void forward_kv_stationary(Context&, const char* op, const AttendOut&, const AttendIn&, const ConstTensor& block_index,
                           int64_t l_sel, const std::function<void(Context& on, const int* unless)>& forward_alike,
                           const CombineAlong* combine);

}  // namespace triad::cuda
