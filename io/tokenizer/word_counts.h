// Distinct words and how often each occurs, in little more memory than their bytes.
#pragma once
#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace triad {

class WordCounts {
 public:
  void add(std::string_view word, int64_t count) { add(word, hash(word), count); }
  void add(std::string_view word, uint32_t hash, int64_t count);
  void clear();  // keeps the memory

  size_t size() const { return entries_.size(); }
  size_t text_bytes() const { return text_.size(); }  // bytes of the distinct words
  std::string_view word(size_t i) const { return std::string_view(text_).substr(entries_[i].begin, entries_[i].bytes); }
  int64_t count(size_t i) const { return entries_[i].count; }
  uint32_t hash(size_t i) const { return entries_[i].hash; }
  static uint32_t hash(std::string_view word);

 private:
  struct Entry {
    uint64_t begin;
    uint32_t bytes, hash;
    int64_t count;
  };
  void grow();

  std::string text_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> slots_;  // hash table with open addressing, at most half full: entry number + 1, or 0
};

// Counts that threads add to at the same time: parts by hash, each with a lock of its own.
class SharedWordCounts {
 public:
  void add(const WordCounts& counts);
  size_t size() const;
  // The parts, for when no thread adds any more.
  static constexpr size_t kParts = 64;
  std::array<WordCounts, kParts>& parts() { return parts_; }

 private:
  std::array<WordCounts, kParts> parts_;
  mutable std::array<std::mutex, kParts> mutexes_;
};

}  // namespace triad
