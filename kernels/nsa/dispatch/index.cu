// The index of a taught selection on the GPU: its lists, the student's lse, and its loss and gradients.
#include "kernels/nsa/index.h"

#include "engine/check.h"
#include "kernels/nsa/select_index.h"

namespace triad::cuda {

void nsa_select_index(Context&, Tensor, ConstTensor iq, ConstTensor ik, const SelectOptions&, const Documents&) {
  fail("nsa_select_index {} {} is not built for CUDA yet (nsa.selector index)", iq.str(), ik.str());
}

void nsa_index_forward(Context&, const IndexForward& index, const AttendIn&, ConstTensor, int64_t) {
  fail("nsa_index_forward {} is not built for CUDA yet (nsa.selector index)", index.in.q.str());
}

void nsa_index_backward(Context&, const IndexBackward& index, const AttendIn&, ConstTensor, ConstTensor, int64_t) {
  fail("nsa_index_backward {} is not built for CUDA yet (nsa.selector index)", index.in.q.str());
}

}  // namespace triad::cuda
