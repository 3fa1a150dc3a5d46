// Finds added tokens (such as "<|endoftext|>") in a text before the text is split into words. The leftmost match is
// taken first, and among several at one position the longest.
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
  bool single_word = false;  // the token matches only if no letter or digit is adjacent
  // lstrip: the match includes the spaces before it; rstrip: the spaces after it.
  bool lstrip = false, rstrip = false;
  bool normalized = false;  // the token is searched in normalized text, in its normal form
  bool special = false;
};

// One kind of added tokens: those searched in normalized text, or those searched in raw text.
class AddedTokens {
 public:
  // tokens: their contents are in the form in which they occur in the text.
  AddedTokens(std::vector<AddedToken> tokens);

  struct Match {
    size_t begin = 0, end = 0;  // match range, including stripped spaces
    int32_t id = 0;
    size_t searched = 0;  // where the next search begins; `end` may be later, because of stripped spaces
  };
  // The first match that begins in [from, limit) of the UTF-8 text. taken: where the previous match ends; no spaces
  // before it are stripped. as_text: special tokens are ignored, because they count as plain text.
  std::optional<Match> find(std::string_view text, size_t from, size_t taken, size_t limit, bool as_text) const;

  bool empty() const { return tokens_.empty(); }
  size_t longest() const { return longest_; }                      // the longest token's length in bytes
  bool depends_on_context() const { return depends_on_context_; }  // whether a match can depend on neighbouring text

 private:
  const AddedToken* longest_at(std::string_view text) const;

  std::vector<AddedToken> tokens_;  // the tokens, sorted by their content
  std::array<bool, 256> begins_{};  // [byte]: whether a token begins with it
  size_t longest_ = 0;
  bool depends_on_context_ = false;
};

}  // namespace triad
