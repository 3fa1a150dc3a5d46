// The branches' forward on Hopper: what each kernel supports, and its launcher. bf16, heads (dk, dv) of (64, 64), (128,
// 128) and (192, 128). `supports` and `pays` are pure functions of the problem.
#pragma once
#include <functional>

#include "kernels/nsa/gate.h"
#include "kernels/nsa/gpu/branch.cuh"

namespace triad::cuda {

// The window and the compressed branch (nsa/sm90/forward_range.cu).
bool forward_sm90_supports(const AttendOut&, const AttendIn&);
void forward_range_sm90(Context&, const char* op, const AttendOut&, const AttendIn&, const KeyRange&);

// The selected branch. combine, if not nullptr: the gated sum of the branches is computed along with o (nsa/gate.h).
// unless, if not nullptr: the kernel returns at once where *unless, on the GPU, is not 0.

// A shared KV tile with a per-row mask (nsa/sm90/shared_tile.cu): up to 1,024 blocks.
bool shared_tile_supports(const AttendOut&, const AttendIn&, int64_t l_sel);
void forward_shared_tile(Context&, const char* op, const AttendOut&, const AttendIn&, const SelectedKeys&,
                         const CombineAlong* combine, const int* unless = nullptr);

// Query-stationary (nsa/sm90/query_stationary.cu): groups of many heads; any number of blocks.
bool query_stationary_supports(const AttendOut&, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
bool query_stationary_pays(const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
void forward_query_stationary(Context&, const char* op, const AttendOut&, const AttendIn&,
                              const ConstTensor& block_index, int64_t l_sel, const CombineAlong* combine,
                              const int* unless = nullptr);

// KV-stationary, split-KV and merge (nsa/sm90/kv_stationary.cu): long sequences whose neighbouring tokens list
// different blocks. The GPU compares the lists; forward_alike(on, unless) has to queue a kernel that computes o and lse
// unless *unless is not 0, for lists that are alike.
bool kv_stationary_supports(const AttendOut&, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
bool kv_stationary_pays(const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
void forward_kv_stationary(Context&, const char* op, const AttendOut&, const AttendIn&, const ConstTensor& block_index,
                           int64_t l_sel, const std::function<void(Context& on, const int* unless)>& forward_alike,
                           const CombineAlong* combine);

}  // namespace triad::cuda
