#include "io/data/document_losses.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/process/counted.h"

namespace triad {

void DocumentLosses::add(int64_t position, double loss) {
  while (index_.end(document_) <= position) ++document_;
  if (by_document_.empty() || by_document_.back().document != document_) by_document_.push_back({{}, document_});
  const int64_t row = position / seq_len_ * seq_len_;
  const int64_t in_document = position - std::max(row, index_.begins[document_]);
  const auto range = std::upper_bound(kEnds.begin(), kEnds.end(), in_document) - kEnds.begin();
  const auto add_to = [&](Sum& sum) { sum.loss += loss, ++sum.positions; };
  add_to(by_document_.back());
  add_to(by_position_[range]);
}

double DocumentLosses::mean_over_documents() const {
  double sum = 0;
  for (const OfDocument& one : by_document_) sum += one.mean();
  return sum / static_cast<double>(by_document_.size());
}

std::string DocumentLosses::csv() const {
  std::string out = "document,first_token,tokens,positions,loss,ppl\n";
  for (const OfDocument& one : by_document_)
    out += fmt::format("{},{},{},{},{:.6f},{:.6f}\n", one.document, index_.begins[one.document],
                       index_.length(one.document), one.positions, one.mean(), std::exp(one.mean()));
  return out;
}

Json DocumentLosses::json() const {
  Json ranges = Json::array();
  for (size_t i = 0; i < by_position_.size(); ++i) {
    const Sum& sum = by_position_[i];
    if (sum.positions == 0) continue;
    ranges.push_back({{"from", i == 0 ? 0 : kEnds[i - 1]},
                      {"to", i < kEnds.size() ? Json(kEnds[i]) : Json()},
                      {"positions", sum.positions},
                      {"loss", sum.mean()},
                      {"ppl", std::exp(sum.mean())}});
  }
  return {{"documents", by_document_.size()}, {"mean_loss", mean_over_documents()}, {"by_position", ranges}};
}

std::string DocumentLosses::table() const {
  const Json all = json();
  const double mean = all["mean_loss"];
  std::string out =
      fmt::format("{}: mean of the losses of documents {:.4f}, perplexity {:.3f}\n{:>18} {:>12} {:>8} {:>11}\n",
                  counted(all["documents"].get<int64_t>(), "document"), mean, std::exp(mean), "token of document",
                  "positions", "loss", "perplexity");
  for (const Json& range : all["by_position"]) {
    const auto k = [](const Json& tokens) { return fmt::format("{}k", tokens.get<int64_t>() >> 10); };
    const std::string from = range["from"] == 0 ? "0" : k(range["from"]);
    out += fmt::format("{:>18} {:>12} {:>8.4f} {:>11.3f}\n",
                       range["to"].is_null() ? from + " and more" : from + " to " + k(range["to"]),
                       range["positions"].get<int64_t>(), range["loss"].get<double>(), range["ppl"].get<double>());
  }
  return out;
}

std::vector<int32_t> bounds_of_rows(const DocumentIndex& index, int64_t begin, int64_t n, int64_t B, int64_t T) {
  std::vector<int32_t> bounds;
  for (int64_t row = 0; row < B; ++row) {
    const int64_t first = row * T,
                  end = std::clamp(n, first, first + T);  // the row's tokens in the source, from `begin`
    bounds.push_back(static_cast<int32_t>(first));
    for (const int64_t at : index.begins_in(begin + first + 1, begin + end))
      bounds.push_back(static_cast<int32_t>(at - begin));
    if (end > first && end < first + T) bounds.push_back(static_cast<int32_t>(end));
  }
  bounds.push_back(static_cast<int32_t>(B * T));
  return bounds;
}

}  // namespace triad
