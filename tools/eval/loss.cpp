#include "tools/eval/loss.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "io/data/dataset.h"
#include "io/data/shard_manifest.h"
#include "io/data/shards.h"
#include "io/file.h"
#include "io/tokenizer/text_bytes.h"
#include "kernels/step/reduce.h"
#include "tools/options.h"
#include "tools/work_progress.h"
#include "train/run/data_source.h"

namespace triad {

namespace {

// Sums the loss over consecutive rows of T tokens, B at a time. Positions that are missing at the end, or whose next
// token the mask excludes, have target -1 and do not count. bytes_by: the tokens' tokenizer, or null if unknown.
// most_batches: computes only this many batches; 0: all. within: whether attention stays within documents. Each
// prediction's loss is added to by_position, and to losses, which is null if it is not known where documents begin.
Total evaluate(LoadedModel& loaded, const TokenSource& source, const Tokenizer* bytes_by, int64_t most_batches,
               bool within, PositionLosses& by_position, DocumentLosses* losses) {
  const int64_t B = loaded.activations().B(), T = loaded.activations().T();
  const int64_t all = source.size() - 1, all_batches = (all + B * T - 1) / (B * T);
  const int64_t batches = most_batches > 0 ? std::min(most_batches, all_batches) : all_batches;
  const int64_t targets = std::min(all, batches * B * T);
  Total total;
  WorkProgress progress("eval", "batches", batches);
  for (int64_t begin = 0; begin < targets; begin += B * T) {
    const int64_t n = std::min(B * T, targets - begin);
    std::vector<int32_t> read(static_cast<size_t>(n + 1));
    source.read(begin, read);
    std::vector<int32_t> tokens(read.begin(), read.end() - 1), next(read.begin() + 1, read.end());
    apply_mask(source.mask(), begin + 1, next);
    if (bytes_by != nullptr) total.bytes += text_bytes(*bytes_by, next);  // the first token is not a target
    tokens.resize(static_cast<size_t>(B * T), 0);
    next.resize(static_cast<size_t>(B * T), -1);
    if (within) {
      const DocumentIndex& index = require_documents(source);
      loaded.set_documents(bounds_of_rows(index, begin, n, B, T));
      if (index.separator == Separator::last)
        for (const int64_t at : index.begins_in(begin + 1, begin + n + 1)) next[at - begin - 1] = -1;
    }
    loaded.set_tokens(tokens, next);
    loaded.model().forward(loaded.ctx(), loaded.activations());
    loaded.model().loss(loaded.ctx(), loaded.activations());
    const std::vector<double> row_loss = read_floats(loaded.ctx(), loaded.activations().row_loss);
    for (int64_t i = 0; i < n; ++i) {
      if (next[i] < 0) continue;
      total.loss += row_loss[i];
      ++total.positions;
      by_position.add(begin + i, row_loss[i]);
      if (losses != nullptr) losses->add(begin + i, row_loss[i]);
    }
    progress.show(begin / (B * T) + 1, total.positions);
  }
  total.seconds = progress.seconds();
  return total;
}

// Whether the tokens are known to come from the checkpoint's tokenizer, so that bits per byte can be computed. Text:
// always. Shards with a manifest: yes; throws an Error if the manifest names another tokenizer. Shards without a
// manifest: if their folders hold files equal to the tokenizer's. The byte tokenizer has no files: if the model's
// vocabulary is 256.
bool tokens_are_known(const LossOptions& o, const LoadedModel& loaded, const Tokenizer& tokenizer) {
  const std::vector<std::string> paths = expand_globs(o.data);
  if (!is_shard(paths.front())) return true;
  const std::vector<Tokenizer::File> files = tokenizer.files();
  const std::string& name = loaded.config().data.tokenizer;
  const bool named = (!name.empty() && name != kNoTokenizer) || !files.empty();
  const ShardOrigin origin = find_manifests(paths);
  for (const ShardManifest& manifest : origin.manifests)
    if (named && !manifest.is_of(tokenizer))
      fail("{} lists shards of the tokenizer {}, but that of the checkpoint {} is {}: its tokens mean something else",
           manifest.path, manifest.tokenizer, o.checkpoint, tokenizer.name());
  if (files.empty()) return named && (origin.unlisted.empty() || loaded.config().model.vocab_size == 256);
  for (const std::string& path : origin.unlisted)
    for (const Tokenizer::File& file : files) {
      const std::filesystem::path sibling = std::filesystem::path(path).parent_path() / file.name;
      if (!std::filesystem::is_regular_file(sibling) || read_file(sibling.string()) != file.content) return false;
    }
  return true;
}

}  // namespace

int64_t most_documents(const LossOptions& o, const Config& config, const TokenSource& source) {
  const bool unset = config.data.documents == DocumentScope::unset;  // `triad init`, which doesn't open the data
  if (unset ? source.documents() == nullptr : !attends_within(config.data)) return 0;
  if (source.documents() == nullptr)
    fail(
        "{} was trained with data.documents attend_within, but where the documents of {} begin is not known: no "
        "manifest.json lists all of its shards and names their separator as `eot` (io/data/README.md)",
        o.checkpoint, source.name());
  const int64_t T = o.seq > 0 ? o.seq : config.train.longest_seq_len();
  return divide_rows(*source.documents(), (source.size() + T - 1) / T, T).most + 1;
}

Losses evaluate(const LossOptions& o, const ModelSource& model, const Tokenizer& tokenizer, const TokenSource& source,
                const std::optional<ModelConfig>& begun) {
  const int64_t most = most_documents(o, model.config, source);
  LoadedModel loaded({.checkpoint = o.checkpoint,
                      .device = parse_device(o.device),
                      .dtype = parse_dtype(o.dtype),
                      .batch = o.batch,
                      .seq_len = o.seq,
                      .most_documents = most,
                      .begun = begun});
  const int64_t T = loaded.activations().T();
  Losses losses{.total = {},
                .seq_len = T,
                .within = most > 0,
                .by_position = {T, most > 0 ? source.documents() : nullptr},
                .by_document = {}};
  if (source.documents() != nullptr) losses.by_document.emplace(*source.documents(), T);
  losses.total = evaluate(loaded, source, tokens_are_known(o, loaded, tokenizer) ? &tokenizer : nullptr, o.batches,
                          losses.within, losses.by_position, losses.by_document ? &*losses.by_document : nullptr);
  TRIAD_CHECK(losses.total.positions > 0, "{}: the loss mask leaves no token that is learned", source.name());
  TRIAD_CHECK(std::isfinite(losses.mean()), "{}: the loss on {} is {}: weights that are not finite?", o.checkpoint,
              source.name(), losses.mean());
  return losses;
}

}  // namespace triad
