// Finds added tokens ("<|endoftext|>") in a text, before the text is split into words: the leftmost match first, and of
// several at one position the longest.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace triad {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool single_word = false;  // no match if a letter or digit is adjacent
  // lstrip, rstrip: the match includes the spaces before or after it
  bool lstrip = false, rstrip = false;
  bool normalized = false;  // matched in normalized text, in its normal form
  bool special = false;
};

// The added tokens of one kind: normalized or not.
class AddedTokens {
 public:
  // contents are in the form that occurs in the text.
  AddedTokens(std::vector<AddedToken> tokens);

  struct Match {
    size_t begin = 0, end = 0;  // with stripped spaces
    int32_t id = 0;
    size_t searched = 0;  // where the next search begins; `end` may be later, after stripped spaces
  };
  // The first match that begins in [from, limit) of the UTF-8 text; stripped spaces do not reach before `taken`.
  // as_text: special tokens are ignored.
  std::optional<Match> find(std::string_view text, size_t from, size_t taken, size_t limit, bool as_text) const;

  bool empty() const { return tokens_.empty(); }
  size_t longest() const { return longest_; }                      // length of the longest token, bytes
  bool depends_on_context() const { return depends_on_context_; }  // matches depend on neighbouring text

 private:
  const AddedToken* longest_at(std::string_view text) const;

  std::vector<AddedToken> tokens_;  // sorted by content
  std::array<bool, 256> begins_{};  // whether a token begins with this byte
  size_t longest_ = 0;
  bool depends_on_context_ = false;
};

}  // namespace triad
