// manifest.json: `triad data` writes it next to its shards. It lists the training and validation shards, and identifies
// their tokenizer by its files' checksums.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/data/documents.h"
#include "io/json_config.h"
#include "io/tokenizer/tokenizer.h"

namespace triad {

enum class ShardSplit { train, val };

// What a manifest says about a shard. Only `triad data` writes the numbers.
struct ListedShard {
  ShardSplit split = ShardSplit::train;
  std::optional<int64_t> tokens, bytes, learned;
  std::optional<uint32_t> crc32;  // CRC-32 of the whole file
};

struct ShardManifest {
  std::string path;                     // path of manifest.json
  std::string tokenizer;                // "byte", or a tokenizer file's path in the manifest's folder; "": unknown
  Json tokenizer_files;                 // what describe_files() returns; empty for the byte tokenizer
  int64_t vocab_size = 0;               // tokenizer's vocabulary size
  Json chat;                            // ChatFormat::to_json() of the conversations; null if there are none
  std::vector<std::string> train, val;  // shard paths
  std::optional<int64_t> train_documents, val_documents;  // document counts in train's and val's shards
  std::unordered_map<std::string, ListedShard> listed;    // both splits' shards, by file name
  // The token that separates documents; -1: unknown.
  int32_t eot = -1;
  Separator separator = Separator::first;  // the manifest's `eot_position`: "first", the default, or "last"

  std::string folder() const;
  // Whether the shards may hold this tokenizer's tokens: compares its files' contents, not their names. True if the
  // manifest does not know its tokenizer.
  bool is_of(const Tokenizer&) const;
  // The manifest's tokenizer as a value for data.tokenizer. Throws an Error that names the file if it is missing or has
  // changed.
  std::string checked_tokenizer() const;
};

// Each file's name, size in bytes and CRC-32.
Json describe_files(const std::vector<Tokenizer::File>&);

// Reads the manifest in a folder; nullopt if the folder has no manifest.json, or another program's. A damaged manifest
// throws, with the key and its value.
std::optional<ShardManifest> read_manifest(const std::string& folder);

// A manifest's split, if find_manifests() was given all its shards.
struct WholeSplit {
  std::string manifest;             // path of manifest.json
  std::vector<size_t> shards = {};  // indices into the given list
  int64_t documents = 0;            // document count, from the manifest
};

// Where shards come from: the manifests that list them, each once, and the shards whose tokenizer is unknown.
struct ShardOrigin {
  // A shard's manifest (an index into manifests), and what the manifest says about the shard.
  struct Entry {
    size_t manifest = 0;
    ListedShard shard;
  };
  std::vector<ShardManifest> manifests;
  std::vector<std::optional<Entry>> entries;  // one for each shard; none: no manifest lists it
  std::vector<std::string> unlisted;
  // Shards that no manifest lists, or whose manifest has no separator, or another one than the first manifest.
  std::vector<std::string> without_separator;

  bool has_separator() const { return without_separator.empty(); }  // manifests.front() has it, too, for all shards
  // The splits that are whole and whose manifest has a document count.
  std::vector<WholeSplit> whole_splits() const;
};
ShardOrigin find_manifests(std::span<const std::string> shards);

// Expands patterns as expand_globs does. A folder with a manifest is replaced by the manifest's shards for this split.
std::vector<std::string> expand_shards(std::span<const std::string> patterns, ShardSplit);

}  // namespace triad
