// The work that `triad bench attention` times: a layer's attention and its parts, each with the least FLOPs and bytes
// that it needs.
#pragma once
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "engine/context.h"
#include "kernels/nsa/document_tables.h"
#include "model/attention.h"
#include "model/flops.h"
#include "tools/bench/attention_input.h"

namespace triad {

// All tensors in a layer's attention.
struct AttentionTensors {
  Tensor qkv, dqkv, dout, dq;
  Tensor index, dindex, index_dq, index_loss;  // absent without a taught index
  Tensor bounds;             // document bounds, i32; bounds and tables are absent if every row is one document
  DocumentTables documents;  // packed rows' tables; the first AttentionPart fills them
  AttentionSaved saved;
  // NSA only. delta, dgate, dk_cmp, dv_cmp and rounding_unit connect the parts; nsa_backward allocates its own in
  // scratch.
  Tensor out, dq_group;
  NsaWeights weights;
  NsaWeightGrads weight_grads;
  Tensor dk_cmp, dv_cmp, dgate, delta, rounding_unit;
  std::vector<Tensor> drawn_weights;  // `weights`' tensors, writable: the bench fills them with random numbers
};

int64_t saved_bytes(const AttentionSaved&);  // bytes that forward keeps for backward
// row_tokens: tokens per sequence; p.T are this rank's.
AttentionTensors allocate_attention(Arena&, const AttentionProblem& p, DType, int64_t row_tokens);

struct AttentionPart {
  using Work = std::function<void(Context&)>;
  std::string name;
  bool forward;
  double flops, bytes;
  Work work;
  bool whole() const { return name == "nsa" || name == "dense" || name == "sel"; }  // the whole attention
};

// AttentionParts: the parts with their FLOPs and bytes, which are closed forms. A matrix product costs 2 FLOPs per
// element and attended (query, key) pair; forward has two products, backward five. Each row counts as read or written
// once. The whole attention moves fewer bytes than its parts together, because it reads q, for example, once.
class AttentionParts {
 public:
  AttentionParts(Device, const AttentionProblem&, const AttentionTensors&, DType);
  const std::vector<AttentionPart>& all() const { return parts_; }

 private:
  using Work = AttentionPart::Work;
  // Elements in rows this wide, one row per token and query head; keys(): per token and key/value group; compressed():
  // per compressed token and group.
  double rows(double width) const { return static_cast<double>(p_.B * p_.T * c_.n_heads) * width; }
  double keys(double width) const { return static_cast<double>(p_.B * p_.T * c_.n_kv_groups) * width; }
  double compressed(double width) const {
    return static_cast<double>(p_.B * c_.n_kv_groups * compressed_length(p_.T, c_.nsa.l, c_.nsa.d)) * width;
  }
  double dk() const { return static_cast<double>(c_.d_k); }
  double dv() const { return static_cast<double>(c_.d_v); }
  // FLOPs for a matrix product this wide over `pairs` attended (query, key) pairs per head.
  double products(double pairs, double width) const {
    return 2 * pairs * static_cast<double>(p_.B * c_.n_heads) * width;
  }
  void add(const char* name, bool forward, double flops, double bytes, Work work) {
    parts_.push_back({name, forward, flops, bytes, std::move(work)});
  }
  // Adds an attention branch. pairs: attended (query, key) pairs per head. kv: elements in the branch's k and v
  // together.
  void add_branch(const char* name, double pairs, double kv, Work forward, Work backward) {
    add(name, true, products(pairs, dk() + dv()), element_ * (rows(dk() + dv()) + kv) + rows(4), std::move(forward));
    backward_.push_back({name, false, products(pairs, 3 * dk() + 2 * dv()),
                         element_ * (rows(2 * dk() + 3 * dv()) + 2 * kv) + rows(8), std::move(backward)});
  }
  void add_document_tables();
  void add_nsa_forward();
  void add_nsa_backward();
  void add_dense(const AttendIn&, const DenseGrad&);
  void add_window(const AttendIn&, const DenseGrad&);
  void add_selected(const AttendIn&, const DenseGrad&);
  void add_index();
  // FLOPs for index products over `pairs` scored (query, key) pairs per group, each as wide as the index.
  double index_products(double pairs) const {
    return 2 * pairs * static_cast<double>(p_.B * c_.n_kv_groups * c_.nsa.d_index);
  }
  std::array<ConstTensor, 3> branch_outputs() const {
    const std::array<Tensor, 3>& o = t_.saved.nsa.o;
    return {o[0], o[1], o[2]};
  }
  AttendIn branch_in(int branch) const {
    const NsaSaved& s = t_.saved.nsa;
    const bool compressed = branch == static_cast<int>(Branch::cmp);
    const auto b = static_cast<size_t>(branch);
    return {in_.q, compressed ? s.k_cmp : in_.k[b], compressed ? s.v_cmp : in_.v[b], in_.documents};
  }
  Tensor make_rounding_unit(Context&, Scratch::Scope&) const;
  Tensor rounding_unit() const { return has_rounding_unit_ ? t_.rounding_unit : Tensor{}; }

  const AttentionProblem& p_;
  const ModelConfig& c_;
  const AttentionTensors& t_;
  double element_;
  AttendedPairs pairs_;  // one head's attended pairs, averaged over sequences
  NsaIn in_;
  NsaGrad grad_;
  IndexIn index_;  // absent without a taught index, like the next
  IndexBackward index_grad_;
  bool has_rounding_unit_ = false;
  std::vector<AttentionPart> parts_;     // ordered so that each part runs after those that compute its inputs
  std::vector<AttentionPart> backward_;  // the branches' backward, which parts_ receives after delta
};

}  // namespace triad
