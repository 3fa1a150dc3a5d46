#include "io/data/position_losses.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "engine/check.h"

namespace triad {

namespace {

// Which range holds a position.
int64_t range_of(int64_t position, int64_t first_end) {
  return std::bit_width(static_cast<uint64_t>(position / first_end));
}

}  // namespace

PositionLosses::PositionLosses(int64_t seq_len, const DocumentIndex* within)
    : seq_len_(seq_len), ranges_(range_of(seq_len - 1, kFirstEnd) + 1), within_(within) {}

void PositionLosses::add(int64_t position, double loss) {
  const int64_t row = position / seq_len_;
  int64_t begin = row * seq_len_;
  if (within_ != nullptr) {
    while (within_->end(document_) <= position) ++document_;
    begin = std::max(begin, within_->begins[static_cast<size_t>(document_)]);
  }
  if (rows() <= row) sums_.resize(static_cast<size_t>((row + 1) * ranges_));
  Sum& sum = sums_[static_cast<size_t>(row * ranges_ + range_of(position - begin, kFirstEnd))];
  sum.loss += loss, ++sum.positions;
}

PositionLosses::Sum PositionLosses::total(int64_t range) const {
  Sum total;
  for (int64_t row = 0; row < rows(); ++row) {
    total.loss += at(row, range).loss;
    total.positions += at(row, range).positions;
  }
  return total;
}

PositionLosses::Difference PositionLosses::minus(const PositionLosses& other) const { return minus(other, 0, ranges_); }

PositionLosses::Difference PositionLosses::minus(const PositionLosses& other, int64_t first, int64_t end) const {
  TRIAD_CHECK(seq_len_ == other.seq_len_ && sums_.size() == other.sums_.size(),
              "losses of {} rows of {} tokens minus those of {} rows of {}", rows(), seq_len_, other.rows(),
              other.seq_len_);
  std::vector<Sum> differences;  // differences in each row that has predictions
  Sum all;
  for (int64_t row = 0; row < rows(); ++row) {
    Sum sum;
    for (int64_t range = first; range < end; ++range) {
      const Sum &a = at(row, range), &b = other.at(row, range);
      TRIAD_CHECK(a.positions == b.positions,
                  "row {} has {} predictions from position {} on, and of the other model {}", row, a.positions,
                  begin_of(range), b.positions);
      sum.loss += a.loss - b.loss, sum.positions += a.positions;
    }
    if (sum.positions == 0) continue;
    differences.push_back(sum);
    all.loss += sum.loss, all.positions += sum.positions;
  }
  const auto rows = static_cast<double>(differences.size()), positions = static_cast<double>(all.positions);
  const double mean = all.loss / positions;
  double squares = 0;
  for (const Sum& sum : differences) squares += std::pow(sum.loss - mean * static_cast<double>(sum.positions), 2);
  return {.mean = mean,
          .standard_error = rows > 1 ? std::sqrt(rows / (rows - 1) * squares) / positions : std::nan(""),
          .rows = static_cast<int64_t>(differences.size())};
}

Json PositionLosses::json(const PositionLosses* other) const {
  Json all = Json::array();
  for (int64_t range = 0; range < ranges_; ++range) {
    const Sum sum = total(range);
    if (sum.positions == 0) continue;
    const auto positions = static_cast<double>(sum.positions);
    const double loss = sum.loss / positions;
    Json one = {{"from", begin_of(range)},
                {"to", end_of(range)},
                {"positions", sum.positions},
                {"loss", loss},
                {"ppl", std::exp(loss)}};
    if (other != nullptr) {
      const Difference difference = minus(*other, range, range + 1);
      one["against_loss"] = other->total(range).loss / positions;
      one["difference"] = difference.mean;
      one["standard_error"] = difference.standard_error;
    }
    all.push_back(std::move(one));
  }
  return all;
}

std::string PositionLosses::csv() const {
  std::string out = "from,to,positions,loss,perplexity\n";
  for (const Json& range : json())
    out += fmt::format("{},{},{},{:.9g},{:.9g}\n", range["from"].get<int64_t>(), range["to"].get<int64_t>(),
                       range["positions"].get<int64_t>(), range["loss"].get<double>(), range["ppl"].get<double>());
  return out;
}

std::string PositionLosses::table(const PositionLosses* other) const {
  std::string out = fmt::format("{:>18} {:>12} {:>8} {:>11}", "tokens before", "positions", "loss", "perplexity");
  if (other != nullptr) out += fmt::format(" {:>8} {:>11} {:>9}", "other", "difference", "std error");
  for (const Json& range : json(other)) {
    const auto k = [](const Json& tokens) {
      const auto n = tokens.get<int64_t>();
      return n % 1024 == 0 && n > 0 ? fmt::format("{}k", n >> 10) : fmt::format("{}", n);
    };
    out += fmt::format("\n{:>18} {:>12} {:>8.4f} {:>11.3f}", k(range["from"]) + " to " + k(range["to"]),
                       range["positions"].get<int64_t>(), range["loss"].get<double>(), range["ppl"].get<double>());
    if (other != nullptr)
      out += fmt::format(" {:>8.4f} {:>+11.4f} {:>9.4f}", range["against_loss"].get<double>(),
                         range["difference"].get<double>(), range["standard_error"].get<double>());
  }
  return out + "\n";
}

}  // namespace triad
