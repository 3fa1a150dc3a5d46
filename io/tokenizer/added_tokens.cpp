#include "io/tokenizer/added_tokens.h"

#include <algorithm>
#include <utility>

#include "engine/process/text.h"
#include "io/tokenizer/unicode.h"

namespace triad {

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::stable_sort(tokens_.begin(), tokens_.end(),
                   [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
  for (const AddedToken& t : tokens_) {
    begins_[static_cast<uint8_t>(t.content[0])] = true;
    longest_ = std::max(longest_, t.content.size());
    depends_on_context_ = depends_on_context_ || t.single_word || t.lstrip || t.rstrip;
  }
}

// The longest token with which the text begins. The tokens are sorted, so those that share a prefix with the text are a
// range, which narrows byte by byte.
const AddedToken* AddedTokens::longest_at(std::string_view text) const {
  const AddedToken* found = nullptr;
  auto begin = tokens_.begin(), end = tokens_.end();
  for (size_t n = 0; n < text.size() && begin != end; ++n) {
    const auto byte = static_cast<uint8_t>(text[n]);
    const auto at_n = [n](const AddedToken& t) { return static_cast<uint8_t>(t.content[n]); };
    begin = std::partition_point(begin, end, [&](const AddedToken& t) { return at_n(t) < byte; });
    end = std::partition_point(begin, end, [&](const AddedToken& t) { return at_n(t) == byte; });
    while (begin != end && begin->content.size() == n + 1) found = &*begin++;
  }
  return found;
}

std::optional<AddedTokens::Match> AddedTokens::find(std::string_view text, size_t from, size_t taken, size_t limit,
                                                    bool as_text) const {
  if (tokens_.empty()) return std::nullopt;
  for (size_t at = from; at < limit; ++at) {
    if (!begins_[static_cast<uint8_t>(text[at])]) continue;
    const AddedToken* token = longest_at(text.substr(at));
    if (token == nullptr) continue;
    Match m{at, at + token->content.size(), token->id, at + token->content.size()};
    const bool word_before = at > 0 && is_word(point_at(text, previous_character(text, at)));
    const bool word_after = m.end < text.size() && is_word(point_at(text, m.end));
    if ((token->special && as_text) || (token->single_word && (word_before || word_after))) {
      at = m.end - 1;  // the token counts as plain text here, and its bytes are not searched again
      continue;
    }
    if (token->lstrip) {
      while (m.begin > taken && is_white_space(point_at(text, previous_character(text, m.begin))))
        m.begin = previous_character(text, m.begin);
    }
    if (token->rstrip)
      while (m.end < text.size() && is_white_space(point_at(text, m.end))) m.end += character_bytes(text, m.end);
    return m;
  }
  return std::nullopt;
}

}  // namespace triad
