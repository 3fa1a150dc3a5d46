// The work that `triad bench attention` times: a layer's attention and its parts, each with its least FLOPs and bytes.
#pragma once
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "engine/context.h"
#include "model/activations.h"
#include "tools/bench/attention_input.h"

namespace triad {

// All tensors of a layer's attention. delta, dgate, dk_cmp, dv_cmp and rounding_unit serve the parts only: the whole
// takes them from scratch.
struct AttentionTensors {
  Tensor qkv, dqkv, out, dout, dq, dq_group;
  NsaSaved saved;
  NsaWeights weights;
  NsaWeightGrads weight_grads;
  Tensor dk_cmp, dv_cmp, dgate, delta, rounding_unit;
  std::vector<Tensor> drawn_weights;  // the tensors of `weights`, writable: the bench fills them with random numbers
};

int64_t saved_bytes(const NsaSaved&);  // bytes that forward keeps for backward
AttentionTensors allocate_attention(Arena&, const AttentionProblem&, DType);

struct AttentionPart {
  using Work = std::function<void(Context&)>;
  std::string name;
  bool forward;
  double flops, bytes;
  Work work;
};

// FLOPs and bytes by closed forms. A matrix product costs 2 FLOPs an element of each attended (query, key) pair;
// forward has two products, backward five. Each row is read and written once. The whole moves fewer bytes than the sum
// of its parts, because it reads q, for example, once.
class AttentionParts {
 public:
  AttentionParts(Device, const AttentionProblem&, const AttentionTensors&, DType);
  const std::vector<AttentionPart>& all() const { return parts_; }

 private:
  using Work = AttentionPart::Work;
  // Elements of all rows of this width: of the query heads, of the key and value groups, of the compressed tokens.
  double rows(double width) const { return static_cast<double>(p_.B * p_.T * c_.n_heads) * width; }
  double keys(double width) const { return static_cast<double>(p_.B * p_.T * c_.n_kv_groups) * width; }
  double compressed(double width) const {
    return static_cast<double>(p_.B * c_.n_kv_groups * compressed_length(p_.T, c_.nsa.l, c_.nsa.d)) * width;
  }
  double dk() const { return static_cast<double>(c_.d_k); }
  double dv() const { return static_cast<double>(c_.d_v); }
  // FLOPs of a product over this many attended pairs a head.
  double products(double pairs, double width) const {
    return 2 * pairs * static_cast<double>(p_.B * c_.n_heads) * width;
  }
  void add(const char* name, bool forward, double flops, double bytes, Work work) {
    parts_.push_back({name, forward, flops, bytes, std::move(work)});
  }
  // A branch of attention. pairs: attended (query, key) pairs a head; kv: elements of its k and v together.
  void add_branch(const char* name, double pairs, double kv, Work forward, Work backward) {
    add(name, true, products(pairs, dk() + dv()), element_ * (rows(dk() + dv()) + kv) + rows(4), std::move(forward));
    backward_.push_back({name, false, products(pairs, 3 * dk() + 2 * dv()),
                         element_ * (rows(2 * dk() + 3 * dv()) + 2 * kv) + rows(8), std::move(backward)});
  }
  void add_nsa_forward();
  void add_nsa_backward();
  void add_dense();
  std::array<ConstTensor, 3> branch_outputs() const { return {t_.saved.o[0], t_.saved.o[1], t_.saved.o[2]}; }
  Tensor make_rounding_unit(Context&, Scratch::Scope&) const;
  Tensor rounding_unit() const { return has_rounding_unit_ ? t_.rounding_unit : Tensor{}; }

  const AttentionProblem& p_;
  const ModelConfig& c_;
  const AttentionTensors& t_;
  double element_;
  NsaIn in_;
  NsaGrad grad_;
  bool has_rounding_unit_ = false;
  std::vector<AttentionPart> parts_;     // in an order in which each part finds its inputs computed by earlier ones
  std::vector<AttentionPart> backward_;  // backward of the branches: appended to parts_ after delta is computed
};

}  // namespace triad
