// Shared by the NSA ops' case tables (*_cases.cpp): random block lists, a branch's arguments and costs.
#pragma once
#include <algorithm>
#include <vector>

#include "engine/rng.h"
#include "kernels/common/op_case.h"
#include "kernels/nsa/compress.h"

namespace triad {

// Lists [B,T,Hkv,n] of the form that nsa_select writes: block 0, the token's own block and the one before it, and
// random complete blocks; ascending, unique, padded with -1. With short_lists a list has a random length, so it may be
// padded even if there are enough blocks.
inline std::vector<double> random_block_lists(uint64_t seed, int64_t B, int64_t T, int64_t Hkv, int64_t n,
                                              int64_t l_sel, bool short_lists = false) {
  std::vector<double> lists;
  const Philox random(seed, 0x6c69737473);
  uint64_t draws = 0;
  for (int64_t i = 0; i < B * T * Hkv; ++i) {
    const int64_t t = i / Hkv % T, current = t / l_sel, complete = (t + 1) / l_sel;
    std::vector<int64_t> list = {0};
    auto add = [&](int64_t block) {
      const bool known = std::find(list.begin(), list.end(), block) != list.end();
      if (!known && static_cast<int64_t>(list.size()) < n) list.push_back(block);
    };
    add(current);
    if (current > 0) add(current - 1);
    const int64_t tries = short_lists ? static_cast<int64_t>(random.below(draws++, static_cast<uint64_t>(n))) : 2 * n;
    for (int64_t k = 0; k < tries && complete > 0; ++k)
      add(static_cast<int64_t>(random.below(draws++, static_cast<uint64_t>(complete))));
    std::sort(list.begin(), list.end());
    list.resize(static_cast<size_t>(n), -1);
    lists.insert(lists.end(), list.begin(), list.end());
  }
  return lists;
}

// How many (token, key) pairs one head computes a score for, in one sequence of T tokens.
inline double window_pairs(int64_t T, int64_t w) {
  double pairs = 0;
  for (int64_t t = 0; t < T; ++t) pairs += static_cast<double>(std::min(t + 1, w));
  return pairs;
}
inline double compressed_pairs(int64_t T, int64_t l, int64_t d) {
  double pairs = 0;
  for (int64_t t = 0; t < T; ++t) pairs += static_cast<double>(compressed_length(t + 1, l, d));
  return pairs;
}
inline double selected_pairs(int64_t T, int64_t n, int64_t l_sel) {
  double pairs = 0;
  for (int64_t t = 0; t < T; ++t) pairs += static_cast<double>(std::min(t + 1, (n - 1) * l_sel + t % l_sel + 1));
  return pairs;
}

struct AttendSizes {
  int64_t B, T, S, Hq, Hkv, dk, dv;
};

// Arguments for an attention branch with T tokens and S keys per sequence.
inline std::vector<Arg> attend_args(const AttendSizes& n, double q_std = 1.0, int64_t row_pad = 0) {
  return {{.name = "q", .role = ArgRole::input_acc, .shape = {n.B, n.T, n.Hq, n.dk}, .std = q_std, .row_pad = row_pad},
          {.name = "k", .role = ArgRole::input, .shape = {n.B, n.S, n.Hkv, n.dk}, .row_pad = row_pad},
          {.name = "v", .role = ArgRole::input, .shape = {n.B, n.S, n.Hkv, n.dv}, .row_pad = row_pad},
          {.name = "o", .role = ArgRole::output, .shape = {n.B, n.T, n.Hq, n.dv}},
          {.name = "lse", .role = ArgRole::saved, .shape = {n.B, n.T, n.Hq}, .type = ArgType::acc}};
}

// Sets one call's costs, given the pairs per head and sequence: 2 FLOPs per multiply-add, two matrix products in
// forward and five in backward; every row is read or written once, in elements of 2 bytes.
inline void set_attend_costs(OpCase& c, const AttendSizes& n, double pairs) {
  const double heads = static_cast<double>(n.B * n.T * n.Hq), keys = static_cast<double>(n.B * n.S * n.Hkv);
  const double widths = static_cast<double>(n.dk + n.dv), dk = static_cast<double>(n.dk),
               dv = static_cast<double>(n.dv);
  const double all_pairs = pairs * static_cast<double>(n.B * n.Hq);
  c.forward_flops = 2 * all_pairs * widths;
  c.backward_flops = 2 * all_pairs * (3 * dk + 2 * dv);
  c.forward_bytes = heads * (2 * widths + 4) + 2 * keys * widths;
  c.backward_bytes = heads * (2 * widths + 8 + 8 * dk) + 4 * keys * widths;  // dq is read and written in fp32
}

}  // namespace triad
