// merge_dkdv() computes dk and dv for blocks whose rows were cut into several pieces (KeyWork), by adding the pieces'
// partial sums.
#pragma once
#include "kernels/nsa/gpu/attend.cuh"

namespace triad::cuda {

// Each piece has stored fp32 sums [block_keys, dk + dv] in its slot of list.partial. The kernel adds a block's pieces
// in order. It skips blocks with a single piece, which has stored dk and dv directly.
struct MergeArgs {
  KeyWorkList list;
  GradView dk, dv;
  KeyRange range;
  int tokens, groups;
  // If query rows are contiguous and cut into pieces every so many tokens, this number: the pieces before a block's
  // first row and after its last row do not exist then (find_part). 0: every block has all pieces.
  int part_tokens = 0;
  int first_token = 0;  // Attend::first_token, from which the pieces are counted
};
void merge_dkdv(Context&, const char* op, const MergeArgs&, int64_t sequences_and_groups);

}  // namespace triad::cuda
