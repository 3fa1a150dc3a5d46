#include "io/tokenizer/word_counts.h"

#include <algorithm>
#include <functional>

#include "engine/check.h"

namespace triad {

namespace {
constexpr size_t kFewestSlots = 64;
constexpr int kPartShift = 26;  // the hash's top 6 bits choose the part; a table uses the lowest
static_assert(SharedWordCounts::kParts == size_t{1} << (32 - kPartShift));
}  // namespace

uint32_t WordCounts::hash(std::string_view word) {
  const uint64_t hash = std::hash<std::string_view>()(word);
  return static_cast<uint32_t>(hash ^ hash >> 32);
}

void WordCounts::add(std::string_view word, uint32_t hash, int64_t count) {
  if (slots_.size() <= 2 * entries_.size()) grow();
  size_t at = hash & (slots_.size() - 1);
  for (; slots_[at] != 0; at = (at + 1) & (slots_.size() - 1)) {
    Entry& entry = entries_[slots_[at] - 1];
    if (entry.hash == hash && entry.bytes == word.size() && text_.compare(entry.begin, entry.bytes, word) == 0) {
      entry.count += count;
      return;
    }
  }
  TRIAD_CHECK(word.size() < UINT32_MAX && entries_.size() < UINT32_MAX - 1, "{} words, the next one has {} bytes",
              entries_.size(), word.size());
  entries_.push_back({text_.size(), static_cast<uint32_t>(word.size()), hash, count});
  text_ += word;
  slots_[at] = static_cast<uint32_t>(entries_.size());
}

void WordCounts::clear() {
  text_.clear();
  entries_.clear();
  std::fill(slots_.begin(), slots_.end(), 0);
}

void WordCounts::grow() {
  slots_.assign(std::max(kFewestSlots, slots_.size() * 2), 0);
  for (size_t i = 0; i < entries_.size(); ++i) {
    size_t at = entries_[i].hash & (slots_.size() - 1);
    while (slots_[at] != 0) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = static_cast<uint32_t>(i + 1);
  }
}

void SharedWordCounts::add(const WordCounts& counts) {
  for (size_t i = 0; i < counts.size(); ++i) {
    const size_t part = counts.hash(i) >> kPartShift;
    const std::lock_guard lock(mutexes_[part]);
    parts_[part].add(counts.word(i), counts.hash(i), counts.count(i));
  }
}

size_t SharedWordCounts::size() const {
  size_t size = 0;
  for (size_t part = 0; part < kParts; ++part) {
    const std::lock_guard lock(mutexes_[part]);
    size += parts_[part].size();
  }
  return size;
}

}  // namespace triad
