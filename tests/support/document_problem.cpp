#include "tests/support/document_problem.h"

#include <span>

#include "kernels/common/op_case_args.h"
#include "kernels/nsa/dense_attention.h"
#include "kernels/nsa/document_tables.h"
#include "kernels/ops/rope.h"

namespace triad::test {

namespace {

const std::vector<std::string> kBranches = {"0", "1", "2"};

Values rounded_values(int64_t n, uint64_t stream, double factor = 1) {
  Values values = random_values(n, stream);
  for (double& x : values) x = round_to(DType::bf16, factor * x);
  return values;
}

// One run: the memory on the device, the tables and the results so far.
class Run {
 public:
  Run(const Setting& setting, const DocumentShape& shape, const DocumentInput& input, int64_t from, int64_t to,
      bool packed)
      : lab_(setting), s_(shape), input_(input), from_(from), T_(to - from) {
    if (!packed) return;
    const int64_t ids = block_ids(T_, s_.c.l_sel, s_.documents());
    tables_ = {poisoned({1, T_}, DType::i32), poisoned({1, T_}, DType::i32), poisoned({1, T_}, DType::i32),
               poisoned({1, ids}, DType::i32)};
    const Tensor bounds = lab_.from(Values(s_.bounds.begin(), s_.bounds.end()), {s_.documents() + 1}, DType::i32);
    nsa_document_tables(lab_.ctx(), tables_, bounds, s_.c.l_sel);
    first_block_ = lab_.values(tables_.first_block);
  }

  void run_nsa(const Values* lists, Values* selected) {
    const int64_t keys = compressed_length(T_, s_.c.l, s_.c.d);
    const Shape lse_shape = {1, T_, s_.Hq()};
    NsaSaved saved{poisoned({1, keys, s_.Hkv, s_.dk}),
                   poisoned({1, keys, s_.Hkv, s_.dv}),
                   poisoned({1, T_, s_.Hkv, s_.c.n_sel}, DType::i32),
                   poisoned({3, 1, T_, s_.Hkv}, acc()),
                   {},
                   {}};
    for (int b = 0; b < 3; ++b) saved.o[b] = poisoned(heads(s_.dv)), saved.lse[b] = poisoned(lse_shape, acc());
    NsaIn in{token_input("q", s_.Hq(), s_.dk), {}, {}, tables_};
    for (int b = 0; b < 3; ++b) {
      in.k[b] = token_input("k" + kBranches[b], s_.Hkv, s_.dk);
      in.v[b] = token_input("v" + kBranches[b], s_.Hkv, s_.dv);
    }
    const auto weights = weights_of<NsaWeights>([&](const std::string& name) {
      const auto found = input_.weights.find(name);
      return found == input_.weights.end()
                 ? Tensor{}
                 : lab_.from(found->second, input_.weight_shapes.at(name), lab_.setting.dtype);
    });
    const auto grads = weights_of<NsaWeightGrads>([&](const std::string& name) {
      if (!input_.weights.contains(name)) return Tensor{};
      const Tensor grad = poisoned(input_.weight_shapes.at(name), acc());
      zero(lab_.ctx(), grad);
      weight_grads_[name] = grad;
      return grad;
    });
    const Tensor out = poisoned(heads(s_.dv)), dout = token_input("dout", s_.Hq(), s_.dv);
    if (lists != nullptr) lab_.assign(saved.block_index, shifted(*lists, 1));
    nsa_forward(lab_.ctx(), out, saved, in, weights, s_.c, lists != nullptr);
    NsaGrad grad{poisoned(heads(s_.dk), acc()), poisoned(groups(s_.dk), acc()), {}, {}, poisoned(heads(s_.dv))};
    for (int b = 0; b < 3; ++b) grad.k[b] = poisoned(groups(s_.dk)), grad.v[b] = poisoned(groups(s_.dv));
    nsa_backward(lab_.ctx(), grad, grads, dout, in, saved, weights, s_.c);

    result_.lists = shifted(lab_.values(saved.block_index), -1);
    keep("out", out), keep("out again", grad.out), keep("dq", grad.dq), keep("dq_group", grad.dq_group);
    for (int b = 0; b < 3; ++b) {
      keep("o" + kBranches[b], saved.o[b]), keep("lse" + kBranches[b], saved.lse[b]);
      keep("dk" + kBranches[b], grad.k[b]), keep("dv" + kBranches[b], grad.v[b]);
      keep("gate" + kBranches[b], saved.gate.slice(0, b, b + 1));
    }
    result_.by_key = {{"k_cmp", lab_.values(saved.k_cmp)}, {"v_cmp", lab_.values(saved.v_cmp)}};
    for (const auto& [name, tensor] : weight_grads_) result_.by_weight[name] = lab_.values(tensor);
    run_stats(saved);
    if (selected == nullptr) return;
    nsa_select(lab_.ctx(), saved.block_index, in.q, saved.k_cmp, saved.lse[kCmp], s_.c, tables_);
    *selected = shifted(lab_.values(saved.block_index), -1);
  }

  void run_dense() {
    const DenseSaved saved{poisoned(heads(s_.dv)), poisoned({1, T_, s_.Hq()}, acc())};
    const DenseGrad grad{poisoned(heads(s_.dk), acc()), poisoned(groups(s_.dk)), poisoned(groups(s_.dv))};
    const AttendIn in{token_input("q", s_.Hq(), s_.dk), token_input("k0", s_.Hkv, s_.dk),
                      token_input("v0", s_.Hkv, s_.dv), tables_};
    dense_attention_forward(lab_.ctx(), saved, in);
    dense_attention_backward(lab_.ctx(), grad, token_input("dout", s_.Hq(), s_.dv), in, saved);
    keep("dense o", saved.o), keep("dense lse", saved.lse), keep("dense dq", grad.dq);
    keep("dense dk", grad.dk), keep("dense dv", grad.dv);
  }

  void run_rope() {
    const Tensor cos = poisoned({s_.T(), s_.dk / 2}, acc()), sin = poisoned({s_.T(), s_.dk / 2}, acc());
    rope_table(lab_.ctx(), cos, sin, s_.dk, {});
    const Tensor y = token_input("q", s_.Hq(), s_.dk), k = token_input("k1", s_.Hkv, s_.dk);
    rope_forward(lab_.ctx(), y, y, cos, sin, {k}, tables_.begin);
    keep("rope q", y), keep("rope k", k);
    const Tensor dy = token_input("q", s_.Hq(), s_.dk), dk = token_input("k1", s_.Hkv, s_.dk);
    const Tensor dx = poisoned(heads(s_.dk));
    rope_backward(lab_.ctx(), dx, dy, cos, sin, {dk}, {}, tables_.begin);
    keep("rope dq", dx), keep("rope dk", dk);
  }

  DocumentResult take() { return std::move(result_); }

 private:
  DType acc() const { return acc_dtype(lab_.setting.dtype); }
  Shape heads(int64_t width) const { return {1, T_, s_.Hq(), width}; }
  Shape groups(int64_t width) const { return {1, T_, s_.Hkv, width}; }
  Tensor poisoned(const Shape& shape) { return lab_.poisoned(shape, lab_.setting.dtype); }
  Tensor poisoned(const Shape& shape, DType dtype) { return lab_.poisoned(shape, dtype); }

  Tensor token_input(const std::string& name, int64_t head_count, int64_t width) {
    const auto first = input_.by_token.at(name).begin() + from_ * head_count * width;
    return lab_.from(Values(first, first + T_ * head_count * width), {1, T_, head_count, width}, lab_.setting.dtype);
  }
  void keep(const std::string& name, const Tensor& t) { result_.by_token[name] = lab_.values(t); }

  // The documents' blocks to ids (sign 1), or back (sign -1).
  Values shifted(Values lists, double sign) const {
    if (first_block_.empty()) return lists;
    for (size_t i = 0; i < lists.size(); ++i)
      if (lists[i] >= 0) lists[i] += sign * first_block_[i / static_cast<size_t>(s_.Hkv * s_.c.n_sel)];
    return lists;
  }

  void run_stats(const NsaSaved& saved) {
    const Tensor pieces = poisoned({kStatsPieces, NsaStats::count}, DType::f64),
                 out = poisoned({1, NsaStats::count}, DType::f64);
    zero(lab_.ctx(), pieces);
    nsa_stats(lab_.ctx(), pieces, saved.gate, saved.block_index, s_.c, tables_);
    nsa_stats_merge(lab_.ctx(), out, pieces.view({1, kStatsPieces, NsaStats::count}));
    std::ranges::copy(lab_.values(out), result_.stats.at);
  }

  // Weights or gradients from a function that maps names.
  template <class Weights, class Get>
  static Weights weights_of(Get&& get) {
    Weights w;
    for (const auto& [name, phi] : {std::pair{"phi_k ", &w.phi_k}, {"phi_v ", &w.phi_v}}) {
      const std::string of = name;
      *phi = {get(of + "w"), get(of + "pos"), get(of + "fc1"), get(of + "fc2")};
    }
    w.gate = {get("gate fc1_w"), get("gate fc1_b"), get("gate fc2_w"), get("gate fc2_b")};
    return w;
  }

  Lab lab_;
  const DocumentShape& s_;
  const DocumentInput& input_;
  int64_t from_, T_;
  DocumentTables tables_;
  Values first_block_;
  std::map<std::string, Tensor> weight_grads_;
  DocumentResult result_;
};

}  // namespace

DocumentInput::DocumentInput(const DocumentShape& s) {
  uint64_t stream = 0;
  const auto add_tokens = [&](const std::string& name, int64_t head_count, int64_t width) {
    by_token[name] = rounded_values(s.T() * head_count * width, stream++);
  };
  const auto add_weight = [&](const std::string& name, const Shape& shape, double factor) {
    weights[name] = rounded_values(shape.numel(), stream++, factor);
    weight_shapes[name] = shape;
  };
  add_tokens("q", s.Hq(), s.dk), add_tokens("dout", s.Hq(), s.dv);
  for (const std::string& b : kBranches) add_tokens("k" + b, s.Hkv, s.dk), add_tokens("v" + b, s.Hkv, s.dv);
  add_weight("gate fc1_w", {s.dk / 2, s.dk}, 0.3), add_weight("gate fc1_b", {s.dk / 2}, 0.3);
  add_weight("gate fc2_w", {3, s.dk / 2}, 0.5), add_weight("gate fc2_b", {3}, 0.5);
  for (const auto& [phi, width] : {std::pair<std::string, int64_t>{"phi_k ", s.dk}, {"phi_v ", s.dv}}) {
    if (s.c.phi == Phi::conv) add_weight(phi + "w", {s.c.l, width}, 0.3);
    if (s.c.phi != Phi::mlp) continue;
    add_weight(phi + "pos", {s.c.l, width}, 0.3);
    add_weight(phi + "fc1", {2 * width, s.c.l * width}, 0.2);
    add_weight(phi + "fc2", {width, 2 * width}, 0.2);
  }
}

void DocumentInput::scale_document(const DocumentShape& s, int64_t document, double factor) {
  for (auto& [name, values] : by_token) {
    const auto width = static_cast<int64_t>(values.size()) / s.T();
    const size_t i = static_cast<size_t>(document);
    for (double& x : std::span(values).subspan(static_cast<size_t>(s.bounds[i] * width),
                                               static_cast<size_t>((s.bounds[i + 1] - s.bounds[i]) * width)))
      x = round_to(DType::bf16, factor * x);
  }
}

DocumentResult run_documents(const Setting& setting, const DocumentShape& shape, const DocumentInput& input,
                             int64_t from, int64_t to, bool packed, const Values* lists, Values* selected) {
  Run run(setting, shape, input, from, to, packed);
  run.run_nsa(lists, selected);
  run.run_dense();
  run.run_rope();
  return run.take();
}

}  // namespace triad::test
