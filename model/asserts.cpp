#include "model/asserts.h"

#include <fmt/ranges.h>

#include "engine/check.h"

namespace triad {

namespace {

std::vector<int64_t> index_of(int64_t element, const Shape& shape) {
  std::vector<int64_t> index(static_cast<size_t>(shape.rank));
  for (int i = shape.rank - 1; i >= 0; --i) {
    index[static_cast<size_t>(i)] = element % shape[i];
    element /= shape[i];
  }
  return index;
}

}  // namespace

Asserts::Asserts(Arena& arena) : first_(arena.alloc(MemTag::workspace, "first violation", DType::i64, {1})) {}

void Asserts::clear(Context& ctx) {
  if (ctx.planning) return;
  backend::fill(first_.data, first_.device, kNoViolationByte, first_.bytes(), ctx.stream.handle());
}

int64_t Asserts::add(Site::Kind kind, int64_t layer, const char* op, const char* name, const ConstTensor& x) {
  std::vector<Site>& sites = sites_[dense_];
  if (next_ == sites.size()) sites.emplace_back();
  sites[next_] = {kind, pass_, layer, op, name, x.shape()};
  return static_cast<int64_t>(2 * next_++) + dense_;
}

void Asserts::finite(Context& ctx, int64_t layer, std::initializer_list<Written> written) {
  for (const auto& [op, name, x] : written)
    if (!x.empty() && x.numel() > 0) assert_finite(ctx, first_, add(Site::Kind::floats, layer, op, name, x), x);
}
void Asserts::lists(Context& ctx, int64_t layer, const char* op, const char* name, ConstTensor lists, int64_t l_sel,
                    const Documents& documents) {
  assert_lists(ctx, first_, add(Site::Kind::lists, layer, op, name, lists), lists, l_sel, documents);
}
void Asserts::range(Context& ctx, const char* name, Tensor ids, int64_t least, int64_t end) {
  assert_range(ctx, first_, add(Site::Kind::ids, -1, "the loader", name, ids), ids, least, end);
}

std::string Asserts::describe(int64_t key) const {
  const Violation v = Violation::of(key);
  const std::vector<Site>& sites = sites_[v.check % 2];
  const auto index = static_cast<size_t>(v.check / 2);
  TRIAD_CHECK(index < sites.size(), "violation {:#x} of a check that was not made", key);
  const Site& site = sites[index];
  const char* const float_faults[] = {"NaN", "+inf", "-inf"};
  const char* const list_faults[] = {"a block that does not exist in its document", "not above the entry before it",
                                     "a block that begins after its token"};
  const char* wrong = site.kind == Site::Kind::floats  ? float_faults[v.what]
                      : site.kind == Site::Kind::lists ? list_faults[v.what]
                                                       : "out of range";
  const std::string where = site.layer < 0 ? "" : fmt::format(" of layer {}", site.layer);
  return fmt::format("{}{}: {}: {}[{}] of {} is {}", site.pass, where, site.op, site.name,
                     fmt::join(index_of(v.element, site.shape), ","), site.shape.str(), wrong);
}

void Asserts::require_none(int64_t key, const std::string& when) const {
  if (key != kNoViolation) fail("{}: runtime.asserts: {}", when, describe(key));
}

void Asserts::require_none(Context& ctx, const std::string& when) const {
  int64_t key = kNoViolation;
  read(ctx, &key, first_);
  require_none(key, when);
}

}  // namespace triad
