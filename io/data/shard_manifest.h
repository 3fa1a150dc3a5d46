// manifest.json, which `triad data` leaves beside its shards: which of them are for training and which are held out,
// and the tokenizer whose tokens they hold, known by the checksums of its files.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "io/tokenizer/tokenizer.h"

namespace triad {

struct ShardManifest {
  std::string path;                     // of manifest.json
  std::string tokenizer;                // "byte", or the path of its file beside the manifest; empty: not known
  Json tokenizer_files;                 // as describe_files() has them; none for bytes
  int64_t vocab_size = 0;               // of the tokenizer
  std::vector<std::string> train, val;  // the shards' paths

  std::string folder() const;
  // Whether the shards hold this tokenizer's tokens, as far as the manifest says. Its content decides, not its name.
  bool is_of(const Tokenizer&) const;
  // What data.tokenizer takes. An Error that names the file if it is gone, or not what it was.
  std::string checked_tokenizer() const;
};

// Name, bytes and CRC-32 of each file.
Json describe_files(const std::vector<Tokenizer::File>&);

// Of the folder; none where it has no manifest.json, or another program's. A damaged one is an Error that names it.
std::optional<ShardManifest> read_manifest(const std::string& folder);

// The manifests that list these shards, each once, and the shards whose tokenizer none says.
struct ShardOrigin {
  std::vector<ShardManifest> manifests;
  std::vector<std::string> unlisted;
};
ShardOrigin find_manifests(std::span<const std::string> shards);

// expand_globs, to which a folder with a manifest stands for its shards of one split.
enum class ShardSplit { train, val };
std::vector<std::string> expand_shards(std::span<const std::string> patterns, ShardSplit);

}  // namespace triad
