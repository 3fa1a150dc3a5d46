#include "train/monitor/grad_ledger.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/integer.h"
#include "kernels/step/per_param_norms.h"
#include "kernels/step/reduce.h"

namespace triad {

namespace {

// Copies a matrix [rows, columns] from the host to the device, into a new tensor that has space for `room` rows.
Tensor upload(Context& ctx, Arena& arena, const char* name, const std::vector<int64_t>& host, int64_t columns,
              int64_t room) {
  const int64_t rows = static_cast<int64_t>(host.size()) / columns;
  const Tensor t = arena.alloc(MemTag::workspace, name, DType::i64, {room, columns}).slice(0, 0, rows);
  write(ctx, t, host.data());
  return t;
}

}  // namespace

GradLedger::GradLedger(Context& ctx, Arena& arena, const Params& params, Tensor sums, const Parts& parts)
    : params_(params), arrivals_(params), sums_(sums) {
  std::vector<int64_t> pieces, first_piece = {0};
  // ranges for which memory is allocated: the same on all ranks, and enough for each
  int64_t most = static_cast<int64_t>(parts.count());
  for (int64_t i = 0; i < params.count(); ++i) {
    const int64_t begin = params.offset(i), end = begin + params.specs()[static_cast<size_t>(i)].shape.numel();
    for (const Parts::Part& part : parts) {
      const ElementRange range = part.elements;
      for (int64_t at = std::max(begin, range.begin); at < std::min(end, range.end); at += kSumPiece)
        pieces.insert(pieces.end(), {at - range.begin + part.at, std::min({kSumPiece, end - at, range.end - at})});
    }
    most += ceil_div(end - begin, kSumPiece);
    first_piece.push_back(static_cast<int64_t>(pieces.size()) / 2);
  }
  pieces_ = upload(ctx, arena, "ledger pieces", pieces, 2, most);
  first_piece_ = upload(ctx, arena, "ledger parts", first_piece, 1, params.count() + 1).view({params.count() + 1});
  norms_ = arena.alloc(MemTag::workspace, "ledger", DType::f64, {params.count(), ParamNorms::count});
}

void GradLedger::ready(ConstTensor grad, const Stream& on) {
  arrivals_.add(grad);
  if (next_ != nullptr) next_->ready(grad, on);
}

void GradLedger::measure(Context& ctx) { per_param_norms(ctx, norms_, sums_, pieces_, first_piece_); }

GradNorms GradLedger::read(const double* norms) const {
  GradNorms out;
  for (int64_t i = 0; i < params_.count(); ++i) {
    out.norm.push_back(std::sqrt(norms[i * ParamNorms::count + ParamNorms::squares]));
    out.not_finite.push_back(static_cast<int64_t>(norms[i * ParamNorms::count + ParamNorms::not_finite]));
  }
  return out;
}

namespace {

// Whether one NSA branch's key or value gradient must be 0: the gates force the branch off, or its queries attend to
// nothing. With one key the softmax is constant 1, so the key's gradient is 0.
bool branch_is_zero(const NsaConfig& c, int64_t seq_len, Branch branch, bool key) {
  if (c.gate.force != Branch::none && c.gate.force != branch) return true;
  int64_t most = std::min(seq_len, c.w);  // most keys that a query attends to in this branch
  if (branch == Branch::cmp) most = compressed_length(seq_len, c.l, c.d);
  if (branch == Branch::sel) most = std::min(seq_len, c.n_sel * c.l_sel);
  return most == 0 || (most == 1 && key);
}

// Whether a parameter makes the keys or values that all branches in an NSA layer share.
bool feeds_all_branches(const ModelConfig& c, const ParamSpec& param) {
  using enum ParamRole;
  const bool in_pair = param.role == k_proj || param.role == v_proj || param.role == k_bias || param.role == v_bias ||
                       param.role == k_norm;
  return in_pair && c.nsa.shared_kv && c.attention_of(param.layer) == AttentionKind::nsa;
}

}  // namespace

bool expects_zero_gradient(const ModelConfig& c, int64_t seq_len, int64_t step, const ParamSpec& param) {
  if (is_gate(param.role)) {
    const bool fc1 = param.role == ParamRole::gate_fc1_weight || param.role == ParamRole::gate_fc1_bias;
    return !c.nsa.gate.has_gradient() || (step <= 1 && fc1);
  }
  // An adapter's B begins as 0, and A's gradient is a product with it.
  if (is_adapter(param.role) && step <= 1 && param.init == ParamSpec::Init::uniform) return true;
  const NsaConfig& n = c.nsa_at(param.layer);
  // With one key the student is 1, as the teacher is.
  if (is_index(param.role)) return n.index_loss == 0 || std::min(seq_len, n.n_sel * n.l_sel) == 1;
  const bool key = is_key(param.role) || (is_adapter(param.role) && param.name.find(".attn.k_") != std::string::npos);
  const auto zero_in = [&](Branch branch) { return branch_is_zero(n, seq_len, branch, key); };
  if (feeds_all_branches(c, param)) return zero_in(Branch::cmp) && zero_in(Branch::sel) && zero_in(Branch::win);
  return param.branch != Branch::none && zero_in(param.branch);
}

}  // namespace triad
