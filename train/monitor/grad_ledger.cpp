#include "train/monitor/grad_ledger.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "engine/check.h"
#include "kernels/step/per_param_norms.h"
#include "kernels/step/reduce.h"

namespace triad {

namespace {

std::string missing_text(const std::vector<std::string>& names, int64_t of) {
  constexpr size_t kMostNames = 8;
  const std::vector<std::string> some(names.begin(), names.begin() + std::min(names.size(), kMostNames));
  return fmt::format("{} of {} gradients never came in this backward: {}{}", names.size(), of, fmt::join(some, ", "),
                     names.size() > kMostNames ? ", ..." : "");
}

// Copies host [rows, columns] to the device, into a tensor allocated with `room` rows.
Tensor upload(Context& ctx, Arena& arena, const char* name, const std::vector<int64_t>& host, int64_t columns,
              int64_t room) {
  const int64_t rows = static_cast<int64_t>(host.size()) / columns;
  const Tensor t = arena.alloc(MemTag::workspace, name, DType::i64, {room, columns}).slice(0, 0, rows);
  write(ctx, t, host.data());
  return t;
}

}  // namespace

MissingGradients::MissingGradients(std::vector<std::string> missing, int64_t all)
    : Error(missing_text(missing, all)), names(std::move(missing)), of(all) {}

GradLedger::GradLedger(Context& ctx, Arena& arena, const Params& params, const std::vector<ElementRange>& own)
    : params_(params), by_offset_(static_cast<size_t>(params.count())), arrived_(by_offset_.size(), false) {
  std::iota(by_offset_.begin(), by_offset_.end(), 0);
  std::sort(by_offset_.begin(), by_offset_.end(),
            [&](int64_t a, int64_t b) { return params.offset(a) < params.offset(b); });
  const std::vector<ElementRange> ranges = own.empty() ? std::vector{ElementRange{0, params.stored_elements()}} : own;
  std::vector<int64_t> pieces, first_piece = {0};
  int64_t most = static_cast<int64_t>(ranges.size());  // bound for any rank: all ranks allocate the same
  for (int64_t i = 0; i < params.count(); ++i) {
    const int64_t begin = params.offset(i), end = begin + params.specs()[static_cast<size_t>(i)].shape.numel();
    for (const ElementRange& range : ranges)
      for (int64_t at = std::max(begin, range.begin); at < std::min(end, range.end); at += kSumPiece)
        pieces.insert(pieces.end(), {at, std::min({kSumPiece, end - at, range.end - at})});
    most += (end - begin + kSumPiece - 1) / kSumPiece;
    first_piece.push_back(static_cast<int64_t>(pieces.size()) / 2);
  }
  pieces_ = upload(ctx, arena, "ledger pieces", pieces, 2, most);
  first_piece_ = upload(ctx, arena, "ledger parts", first_piece, 1, params.count() + 1).view({params.count() + 1});
  norms_ = arena.alloc(MemTag::workspace, "ledger", DType::f64, {params.count(), ParamNorms::count});
}

void GradLedger::ready(ConstTensor grad, const Stream& on) {
  const ConstTensor all = params_.grads();
  const int64_t begin = (grad.data - all.data) / size_of(all.dtype), end = begin + grad.numel();
  const auto first = std::lower_bound(by_offset_.begin(), by_offset_.end(), begin,
                                      [&](int64_t i, int64_t at) { return params_.offset(i) < at; });
  for (auto it = first; it != by_offset_.end() && params_.offset(*it) < end; ++it)
    arrived_[static_cast<size_t>(*it)] = true;
  if (next_ != nullptr) next_->ready(grad, on);
}

std::vector<std::string> GradLedger::missing() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < arrived_.size(); ++i)
    if (!arrived_[i]) names.push_back(params_.specs()[i].name);
  return names;
}

void GradLedger::require_all() const {
  if (std::vector<std::string> names = missing(); !names.empty()) throw MissingGradients(names, params_.count());
}

void GradLedger::measure(Context& ctx) { per_param_norms(ctx, norms_, params_.grads(), pieces_, first_piece_); }

GradNorms GradLedger::read(const double* norms) const {
  GradNorms out;
  for (int64_t i = 0; i < params_.count(); ++i) {
    out.norm.push_back(std::sqrt(norms[i * ParamNorms::count + ParamNorms::squares]));
    out.not_finite.push_back(static_cast<int64_t>(norms[i * ParamNorms::count + ParamNorms::not_finite]));
  }
  return out;
}

bool expects_zero_gradient(const ModelConfig& c, int64_t seq_len, int64_t step, const std::string& name) {
  if (c.dense()) return false;
  const auto has = [&](std::string_view part) { return name.find(part) != std::string::npos; };
  if (has(".attn.gate.")) return !c.nsa.gate.has_gradient() || (step <= 1 && has(".gate.fc1."));
  struct Seen {
    Branch branch;
    int64_t most;  // maximum number of entries that a query attends to
  };
  for (const auto& [branch, most] : {Seen{Branch::cmp, seq_len < c.nsa.l ? 0 : (seq_len - c.nsa.l) / c.nsa.d + 1},
                                     Seen{Branch::sel, std::min(seq_len, c.nsa.n_sel * c.nsa.l_sel)},
                                     Seen{Branch::win, std::min(seq_len, c.nsa.w)}}) {
    const bool owns = has(fmt::format("_{}_proj.", word_of(branch))) || (branch == Branch::cmp && has(".attn.phi_"));
    const bool off = c.nsa.gate.force != Branch::none && c.nsa.gate.force != branch;
    if (owns && (off || most == 0)) return true;
    if (owns && most == 1 && (has(".attn.k_") || has(".attn.phi_k."))) return true;  // the softmax of one entry is 1
  }
  return false;
}

}  // namespace triad
