#include "tools/eval/compare.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "engine/check.h"

namespace triad {

namespace {

bool same_tokenizer(const Tokenizer& a, const Tokenizer& b) {
  const auto equal = [](const Tokenizer::File& x, const Tokenizer::File& y) {
    return x.name == y.name && x.content == y.content;
  };
  const std::vector<Tokenizer::File> x = a.files(), y = b.files();
  return x.empty() && y.empty() ? a.name() == b.name() : std::equal(x.begin(), x.end(), y.begin(), y.end(), equal);
}

}  // namespace

void check_against(const LossOptions& o, const ModelSource& model, const Tokenizer& tokenizer,
                   const std::string& against, const ModelSource& other, const TokenSource& source) {
  const auto other_tokenizer = tokenizer_of_checkpoint(other.folder, other.config.data.tokenizer);
  if (!same_tokenizer(tokenizer, *other_tokenizer))
    fail("--against {}: its tokenizer is {}, and that of {} is {}: the same tokens mean different texts", against,
         other_tokenizer->name(), o.checkpoint, tokenizer.name());
  const auto scope = [&](const ModelSource& m) {
    return most_documents(o, m.config, source) > 0 ? "attend_within" : "attend_across";
  };
  if (const std::string_view ours = scope(model), theirs = scope(other); ours != theirs)
    fail("--against {}: its data.documents is {}, and that of {} is {}: their predictions do not have the same context",
         against, theirs, o.checkpoint, ours);
}

}  // namespace triad
