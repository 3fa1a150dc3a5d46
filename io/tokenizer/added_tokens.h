// Tokens that stand in the text as they are ("<|endoftext|>"): found before anything else looks at it, the leftmost
// first, of several there the longest.
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
  bool single_word = false;             // not beside a letter or digit
  bool lstrip = false, rstrip = false;  // takes the spaces before, behind it
  bool normalized = false;              // looked for behind the normalizer, in its normal form
  bool special = false;
};

// Those of one kind, normalized or not.
class AddedTokens {
 public:
  // contents: in the form that is looked for.
  AddedTokens(std::vector<AddedToken> tokens);

  struct Match {
    size_t begin = 0, end = 0;  // with the spaces that it takes
    int32_t id = 0;
    size_t searched = 0;  // where the search goes on; its spaces may lie past it
  };
  // The first at or after `from` in UTF-8 text, of which those before `taken` are gone. Beginnings at or past `limit`
  // are not looked at. as_text: special ones are text.
  std::optional<Match> find(std::string_view text, size_t from, size_t taken, size_t limit, bool as_text) const;

  bool empty() const { return tokens_.empty(); }
  size_t longest() const { return longest_; }        // bytes
  bool look_around() const { return look_around_; }  // some have a flag by which what is beside them counts

 private:
  const AddedToken* longest_at(std::string_view text) const;

  std::vector<AddedToken> tokens_;  // by content
  std::array<bool, 256> begins_{};  // a token, with this byte
  size_t longest_ = 0;
  bool look_around_ = false;
};

}  // namespace triad
