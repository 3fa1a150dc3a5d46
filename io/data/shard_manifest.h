// manifest.json, which `triad data` writes next to its shards: the training and validation shards, and the tokenizer of
// their tokens, identified by the checksums of its files.
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
  std::string path;                     // path of manifest.json
  std::string tokenizer;                // "byte", or the path of the tokenizer's file in the same folder; "": unknown
  Json tokenizer_files;                 // as from describe_files(); empty for bytes
  int64_t vocab_size = 0;               // the tokenizer's vocabulary
  std::vector<std::string> train, val;  // paths of the shards

  std::string folder() const;
  // Whether the shards may hold this tokenizer's tokens: the files' contents are compared, not their names. True if the
  // manifest's tokenizer is unknown.
  bool is_of(const Tokenizer&) const;
  // The value for data.tokenizer. Throws an Error that names the file if it is missing or has changed.
  std::string checked_tokenizer() const;
};

// Name, bytes and CRC-32 of each file.
Json describe_files(const std::vector<Tokenizer::File>&);

// The manifest in a folder; nullopt if there is no manifest.json, or one of another program. A damaged one throws.
std::optional<ShardManifest> read_manifest(const std::string& folder);

// The manifests that list the given shards, each once, and the shards whose tokenizer is unknown.
struct ShardOrigin {
  std::vector<ShardManifest> manifests;
  std::vector<std::string> unlisted;
};
ShardOrigin find_manifests(std::span<const std::string> shards);

// As expand_globs, where a folder with a manifest means its shards of one split.
enum class ShardSplit { train, val };
std::vector<std::string> expand_shards(std::span<const std::string> patterns, ShardSplit);

}  // namespace triad
