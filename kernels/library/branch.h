// Attention over the keys of one branch: what the functions of parts.cpp and block_sparse.cpp share.
#pragma once
#include "kernels/library/library.h"

namespace triad::library {

inline void need(const void* pointer, const char* name) {
  if (pointer == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "{} is NULL", name);
}
inline bool present(const triad_nsa_tensor* t) { return t != nullptr && t->rank != 0; }

// A branch's inputs, checked.
struct Branch {
  int branch;  // triad_nsa_branch
  ConstTensor q, k, v, block_index;
  DType type, acc;
  Shape o_shape, lse_shape;
};
Branch read_branch(const Call&, int branch, const triad_nsa_tensor* q, const triad_nsa_tensor* k,
                   const triad_nsa_tensor* v, const triad_nsa_tensor* block_index);
// Throws unless the heads of q [..,Hq,..] are a multiple of the groups of k.
void expect_groups(const char* k_name, int64_t Hq, int64_t Hkv);

void attend(Call&, const triad_nsa_documents*, const Branch&, const triad_nsa_tensor* o, const triad_nsa_tensor* lse);

struct AttendBackwardArguments {
  const triad_nsa_tensor *o, *lse, *d_o, *dq, *dk, *dv;
  const triad_nsa_tensor* dlse = nullptr;  // lse's gradient; NULL: 0
};
void attend_backward(Call&, const triad_nsa_documents*, const Branch&, const AttendBackwardArguments&);

}  // namespace triad::library
