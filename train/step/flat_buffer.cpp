#include "train/step/flat_buffer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace triad {

namespace {

std::string missing_text(const std::vector<std::string>& names, int64_t of) {
  constexpr size_t kMostNames = 8;
  const std::vector<std::string> some(names.begin(), names.begin() + std::min(names.size(), kMostNames));
  return fmt::format("{} of {} gradients never came in this backward: {}{}", names.size(), of, fmt::join(some, ", "),
                     names.size() > kMostNames ? ", ..." : "");
}

}  // namespace

ElementRange range_of(const Params& params, int64_t i) {
  const int64_t begin = params.offset(i);
  return {begin, begin + params.specs()[static_cast<size_t>(i)].stored().numel()};
}

int64_t index_of_param(const Params& params, const std::string& name) {
  for (int64_t i = 0; i < params.count(); ++i)
    if (params.specs()[static_cast<size_t>(i)].name == name) return i;
  fail("the model has no parameter {}", name);
}

MissingGradients::MissingGradients(std::vector<std::string> missing, int64_t all)
    : Error(missing_text(missing, all)), names(std::move(missing)), of(all) {}

GradFinder::GradFinder(const Params& params) : params_(params), by_offset_(static_cast<size_t>(params.count())) {
  std::iota(by_offset_.begin(), by_offset_.end(), 0);
  std::sort(by_offset_.begin(), by_offset_.end(),
            [&](int64_t a, int64_t b) { return params.offset(a) < params.offset(b); });
}

std::vector<int64_t> GradFinder::find(ConstTensor grad) const {
  const ElementRange range = params_.range_of_grad(grad);
  std::vector<int64_t> found;
  auto it = std::lower_bound(by_offset_.begin(), by_offset_.end(), range.begin,
                             [&](int64_t i, int64_t at) { return params_.offset(i) < at; });
  for (; it != by_offset_.end() && params_.offset(*it) < range.end; ++it) found.push_back(*it);
  return found;
}

GradArrivals::GradArrivals(const Params& params)
    : params_(params), finder_(params), arrived_(static_cast<size_t>(params.count()), false) {}

void GradArrivals::add(ConstTensor grad) {
  for (const int64_t param : finder_.find(grad)) {
    const auto i = static_cast<size_t>(param);
    if (arrived_[i]) fail("the gradient of {} came twice in one backward", params_.specs()[i].name);
    arrived_[i] = true;
  }
}

std::vector<std::string> GradArrivals::missing() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < arrived_.size(); ++i)
    if (!arrived_[i]) names.push_back(params_.specs()[i].name);
  return names;
}

void GradArrivals::require_all() const {
  if (std::vector<std::string> names = missing(); !names.empty())
    throw MissingGradients(std::move(names), params_.count());
}

}  // namespace triad
