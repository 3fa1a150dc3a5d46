// The work that `triad bench attention` times: every tensor of a layer's attention, and its parts, each with the FLOPs
// and bytes that it has to cost.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "engine/context.h"
#include "model/activations.h"
#include "tools/bench/attention_input.h"

namespace triad {

// Every tensor that a layer's attention works on, and a few for the parts alone, which the whole takes from scratch.
struct AttentionTensors {
  Tensor qkv, dqkv, out, dout, dq, dq_group;
  NsaSaved saved;
  NsaWeights weights;
  NsaWeightGrads weight_grads;
  Tensor dk_cmp, dv_cmp, dgate, delta, rounding_unit;
  std::vector<Tensor> drawn_weights;  // those of `weights`, to be written
};

int64_t saved_bytes(const NsaSaved&);  // for backward
AttentionTensors allocate_attention(Arena&, const AttentionProblem&, DType);

struct AttentionPart {
  using Work = std::function<void(Context&)>;
  std::string name;
  bool forward;
  double flops, bytes;
  Work work;
};

// FLOPs and bytes by the closed forms: a product of a pair is 2 FLOPs an element, forward has two, backward five; rows
// are read and written once. The whole moves less than its parts together: q, say, is read once.
class AttentionParts {
 public:
  AttentionParts(Device, const AttentionProblem&, const AttentionTensors&, DType);
  const std::vector<AttentionPart>& all() const { return parts_; }

 private:
  using Work = AttentionPart::Work;
  double rows(double width) const { return static_cast<double>(p_.B * p_.T * c_.n_heads) * width; }      // of queries
  double keys(double width) const { return static_cast<double>(p_.B * p_.T * c_.n_kv_groups) * width; }  // raw ones
  double compressed(double width) const {
    return static_cast<double>(p_.B * c_.n_kv_groups * compressed_length(p_.T, c_.nsa.l, c_.nsa.d)) * width;
  }
  double dk() const { return static_cast<double>(c_.d_k); }
  double dv() const { return static_cast<double>(c_.d_v); }
  double products(double pairs, double width) const {
    return 2 * pairs * static_cast<double>(p_.B * c_.n_heads) * width;
  }
  void add(const char* name, bool forward, double flops, double bytes, Work work) {
    parts_.push_back({name, forward, flops, bytes, std::move(work)});
  }
  // A branch: pairs it attends, elements of its k and v together.
  void add_branch(const char* name, double pairs, double kv, Work forward, Work backward) {
    add(name, true, products(pairs, dk() + dv()), element_ * (rows(dk() + dv()) + kv) + rows(4), std::move(forward));
    backward_.push_back({name, false, products(pairs, 3 * dk() + 2 * dv()),
                         element_ * (rows(2 * dk() + 3 * dv()) + 2 * kv) + rows(8), std::move(backward)});
  }
  void add_nsa();
  void add_dense();
  Tensor make_rounding_unit(Context&, Scratch::Scope&) const;
  Tensor rounding_unit() const { return has_rounding_unit_ ? t_.rounding_unit : Tensor{}; }

  const AttentionProblem& p_;
  const ModelConfig& c_;
  const AttentionTensors& t_;
  double element_;
  NsaIn in_;
  NsaGrad grad_;
  bool has_rounding_unit_ = false;
  std::vector<AttentionPart> parts_;     // each finds what it needs left behind by the ones before it
  std::vector<AttentionPart> backward_;  // the branches', to go behind what they need
};

}  // namespace triad
