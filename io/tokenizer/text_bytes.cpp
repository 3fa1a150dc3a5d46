#include "io/tokenizer/text_bytes.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace triad {

int64_t text_bytes(const Tokenizer& tokenizer, std::span<const int32_t> targets) {
  std::vector<int32_t> text;
  std::copy_if(targets.begin(), targets.end(), std::back_inserter(text),
               [eot = tokenizer.eot()](int32_t token) { return token >= 0 && token != eot; });
  return static_cast<int64_t>(tokenizer.decode(text).size());
}

}  // namespace triad
