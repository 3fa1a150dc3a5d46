#include "train/monitor/document_lengths.h"

#include <algorithm>
#include <bit>
#include <vector>

namespace triad {

namespace {

constexpr int kSchema = 1;

// Counts documents by length: range i has the lengths from 2^i to 2^(i+1) - 1.
class LengthRanges {
 public:
  void add(int64_t length, int64_t number = 1) {
    const auto range = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(length)) - 1);
    if (range >= ranges_.size()) ranges_.resize(range + 1);
    ranges_[range].documents += number;
    ranges_[range].tokens += number * length;
  }
  Json json() const {
    Json out = Json::array();
    for (size_t i = 0; i < ranges_.size(); ++i)
      if (!out.empty() || ranges_[i].documents > 0)
        out.push_back({{"from", int64_t{1} << i},
                       {"to", int64_t{2} << i},
                       {"documents", ranges_[i].documents},
                       {"tokens", ranges_[i].tokens}});
    return out;
  }

 private:
  struct Range {
    int64_t documents = 0, tokens = 0;
  };
  std::vector<Range> ranges_;
};

}  // namespace

Json document_lengths(const std::vector<const DocumentIndex*>& indices, const DocumentMix& row_parts) {
  LengthRanges all, parts;
  int64_t longest = 0, documents = 0, tokens = 0;
  for (const DocumentIndex* index : indices) {
    for (int64_t i = 0; i < index->count(); ++i) {
      const int64_t length = index->length(i);
      longest = std::max(longest, length);
      if (length > 0) all.add(length);  // an empty source has one document without tokens
    }
    documents += index->count(), tokens += index->size;
  }
  for (const auto& [length, number] : row_parts.documents) parts.add(length, number);
  return {{"schema", kSchema},  {"documents", documents}, {"tokens", tokens},
          {"longest", longest}, {"lengths", all.json()},  {"row_parts", row_parts.rows > 0 ? parts.json() : Json()}};
}

}  // namespace triad
