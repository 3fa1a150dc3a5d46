#include "engine/routes.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/check.h"

namespace triad {

namespace {

constexpr std::string_view kGeneral = kGeneralKernel, kCpu = "cpu";

}  // namespace

bool KernelChoices::any_branch_is_reference() const {
  return cmp == KernelChoice::reference || sel == KernelChoice::reference || win == KernelChoice::reference;
}

std::string Routes::Count::shapes() const {
  return first.rank == 0 ? "" : fmt::format("{} {} {}", name_of(dtype), first.str(), second.str());
}

KernelChoice Routes::wanted(std::string_view op) const {
  const std::string branch = branch_of(op);
  if (branch == "cmp") return wanted_.cmp;
  if (branch == "sel" || branch == "select") return wanted_.sel;
  if (branch == "win") return wanted_.win;
  return branch == "matmul" ? wanted_.matmul : KernelChoice::automatic;
}

void Routes::set_call(const ConstTensor& first, const ConstTensor& second) {
  dtype_ = first.dtype, first_ = first.shape(), second_ = second.shape();
}

void Routes::record(std::string_view op, std::string_view kernel, std::string_view reason) {
  const KernelChoice choice = wanted(op);
  if (choice == KernelChoice::reference && kernel == kGeneral) kernel = "reference";
  if (choice == KernelChoice::fused && reason.empty()) {
    if (kernel == kCpu) reason = "the CPU has one route, which is not fused";
    if (kernel == kGeneral) reason = "fused kernels are for bf16 on sm_90";
  }
  Count& count = counts_[find(op, kernel, reason)];
  ++count.calls;
  if (strict_ && count.is_fallback())
    fail("{} of {}{} falls back on the kernel {}: {}. runtime.strict is true", op, count.shapes(),
         layer_ < 0 ? "" : fmt::format(" in layer {}", layer_), kernel, reason);
}

// The index of a call's entry, which is new at the first such call. Only the layer's own entries are searched: a step
// calls this for each product in each layer.
size_t Routes::find(std::string_view op, std::string_view kernel, std::string_view reason) {
  const auto slot = static_cast<size_t>(layer_ + 1);
  if (slot >= layer_entries_.size()) layer_entries_.resize(slot + 1);
  for (const size_t i : layer_entries_[slot]) {
    const Count& c = counts_[i];
    ++looks_;
    if (c.op == op && c.kernel == kernel && c.reason == reason && c.dtype == dtype_ && c.first == first_ &&
        c.second == second_)
      return i;
  }
  layer_entries_[slot].push_back(counts_.size());
  counts_.push_back({layer_, std::string(op), std::string(kernel), std::string(reason), dtype_, first_, second_, 0});
  return counts_.size() - 1;
}

int64_t Routes::fallbacks() const {
  int64_t calls = 0;
  for (const Count& c : counts_) calls += c.is_fallback() ? c.calls : 0;
  return calls;
}

int64_t Routes::fallbacks(std::string_view branch) const {
  int64_t calls = 0;
  for (const Count& c : counts_) calls += c.is_fallback() && branch_of(c.op) == branch ? c.calls : 0;
  return calls;
}

std::string Routes::summary() const {
  std::vector<Count> merged;
  for (const Count& c : counts_) {
    if (!c.is_fallback()) continue;
    const auto same = [&](const Count& m) { return m.op == c.op && m.kernel == c.kernel && m.reason == c.reason; };
    auto found = std::find_if(merged.begin(), merged.end(), same);
    if (found == merged.end()) found = merged.insert(found, Count{-1, c.op, c.kernel, c.reason, c.dtype, {}, {}, 0});
    found->calls += c.calls;
  }
  if (merged.empty()) return "no fallbacks";
  std::string text;
  for (const Count& m : merged)
    text += fmt::format("{} {} {} ({}) {} times", text.empty() ? ":" : ",", m.op, m.kernel, m.reason, m.calls);
  return fmt::format("{} fallbacks{}", fallbacks(), text);
}

std::string branch_of(std::string_view op) {
  constexpr std::pair<std::string_view, std::string_view> kBranches[] = {
      {"nsa_attend_compressed", "cmp"}, {"nsa_attend_selected", "sel"}, {"nsa_attend_window", "win"},
      {"dense_attention", "win"},       {"nsa_select", "select"},       {"nsa_index", "sel"},
      {"linear_silu", "matmul"},        {"linear_swiglu", "matmul"},    {"symmetric_product", "matmul"}};
  for (const auto& [prefix, branch] : kBranches)
    if (op.starts_with(prefix)) return std::string(branch);
  return std::string(op);
}

}  // namespace triad
