#include "io/tokenizer/word_counter.h"

#include <optional>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/tokenizer/unicode.h"

namespace triad {

namespace {

// A thread's own counts are added to those that all share when they reach one of these, about 4 MB.
constexpr size_t kMostWords = size_t{1} << 16, kMostBytes = size_t{1} << 20;

bool is_letter(char c) { return (c | 0x20) >= 'a' && (c | 0x20) <= 'z'; }
// Ideographs, which are letters in every version of Unicode.
bool is_ideograph(uint32_t point) { return point >= 0x4e00 && point <= 0x9fa5; }

// Whether each of the patterns ends a match between text[at - 1] and text[at], whatever is around them: before a blank
// that follows something else, and after a letter that none follows.
bool splits_before(std::string_view text, size_t at) {
  const char next = text[at];
  if (static_cast<unsigned char>(next) >= 0x80 || is_letter(next)) return false;
  const size_t begin = previous_character(text, at);
  if (utf8_prefix(text.substr(begin, at - begin)) != at - begin) return false;
  const uint32_t point = point_at(text, begin);
  if (is_ideograph(point) || (begin + 1 == at && is_letter(text[begin]))) return true;
  return next == ' ' && !is_white_space(point);
}

}  // namespace

const char* pattern_of(WordSplit split) {
  switch (split) {
    case WordSplit::gpt2:
      return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    case WordSplit::gpt4:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+)"
             R"(|\s+(?!\S)|\s+)";
    case WordSplit::qwen:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+)"
             R"(|\s+(?!\S)|\s+)";
  }
  fail("no such split: {}", static_cast<int>(split));
}

struct WordCounter::Workspace {
  explicit Workspace(const Pattern& pattern) : matcher(pattern) {}
  Pattern::Matcher matcher;
  WordCounts counts;
};

WordCounter::WordCounter(WordSplit split) : pattern_(pattern_of(split), std::string(word_of(split))) {}

WordCounter::~WordCounter() = default;

void WordCounter::append(std::string_view text, std::vector<int32_t>&) const {
  std::unique_ptr<Workspace> workspace;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      workspace = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!workspace) workspace = std::make_unique<Workspace>(pattern_);
  while (!text.empty()) {
    const size_t valid = utf8_prefix(text);
    count(text.substr(0, valid), *workspace);
    text.remove_prefix(valid);
    const size_t invalid = invalid_prefix(text);
    if (invalid > 0) workspace->counts.add(text.substr(0, invalid), 1);
    text.remove_prefix(invalid);
  }
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(workspace));
}

void WordCounter::count(std::string_view text, Workspace& workspace) const {
  WordCounts& counts = workspace.counts;
  Pattern::Span match;
  for (size_t done = 0; done < text.size(); done = match.end) {
    const Pattern::Found found = pattern_.find(workspace.matcher, text, done, false, match);
    TRIAD_CHECK(found == Pattern::Found::match && match.begin == done,
                "the pattern matches no character at offset {} of {}", done, text.size());
    counts.add(text.substr(done, match.end - done), 1);
    if (counts.size() >= kMostWords || counts.text_bytes() >= kMostBytes) {
      counts_.add(counts);
      counts.clear();
    }
  }
}

size_t WordCounter::append_prefix(std::string_view, std::vector<int32_t>&) const { return 0; }

size_t WordCounter::safe_cut(std::string_view text) const {
  for (size_t at = text.size(); at-- > 1;)
    if (splits_before(text, at)) return at;
  return 0;
}

SharedWordCounts& WordCounter::finish() {
  const std::lock_guard lock(mutex_);
  for (const std::unique_ptr<Workspace>& workspace : idle_) counts_.add(workspace->counts);
  idle_.clear();
  return counts_;
}

}  // namespace triad
