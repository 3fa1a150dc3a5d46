#include "io/data/shard_manifest.h"

#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "engine/check.h"
#include "io/file.h"
#include "io/tokenizer/unicode.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

constexpr const char* kManifest = "manifest.json";

std::string sibling(const fs::path& manifest, const std::string& name) {
  return (manifest.parent_path() / name).string();
}

std::vector<std::string> shards_of(const ShardManifest& manifest, const Json& row) {
  std::vector<std::string> paths;
  for (const Json& shard : row.at("shards"))
    paths.push_back(sibling(manifest.path, shard.at("file").get<std::string>()));
  return paths;
}

void read_separator(ShardManifest& manifest, const Json& json) {
  const auto eot = json.value("eot", int64_t{-1});
  if (eot < -1 || eot >= manifest.vocab_size)
    fail("{}: its eot is {}: a token of its vocabulary of {} is needed", manifest.path, eot, manifest.vocab_size);
  manifest.eot = static_cast<int32_t>(eot);
  const auto position = json.value("eot_position", std::string("first"));
  if (position != "first" && position != "last")
    fail("{}: its eot_position is \"{}\": first or last is allowed", manifest.path, shortened(position));
  manifest.separator = position == "last" ? Separator::last : Separator::first;
}

// Sizes and checksums of the files without their names, because a tokenizer may be read from files of other names.
std::vector<Json> checksums(const Json& files) {
  std::vector<Json> sums;
  for (const Json& file : files) sums.push_back({file.at("bytes"), file.at("crc32")});
  return sums;
}

// The tokenizer files in a folder. For a manifest that does not list its tokenizer's files: those in its folder belong
// to the shards.
Json files_in(const std::string& folder) {
  try {
    return describe_files(make_tokenizer(folder)->files());
  } catch (const UsageError&) { return nullptr; }  // the folder has no tokenizer files
}

bool lists(const ShardManifest& manifest, const fs::path& shard) {
  const auto is_shard = [&](const std::string& path) { return fs::path(path).filename() == shard.filename(); };
  return std::any_of(manifest.train.begin(), manifest.train.end(), is_shard) ||
         std::any_of(manifest.val.begin(), manifest.val.end(), is_shard);
}

bool same_separator(const ShardManifest& a, const ShardManifest& b) {
  return a.eot >= 0 && a.eot == b.eot && a.separator == b.separator;
}

}  // namespace

std::string ShardManifest::folder() const {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

bool ShardManifest::is_of(const Tokenizer& other) const {
  return tokenizer.empty() || checksums(tokenizer_files) == checksums(describe_files(other.files()));
}

std::string ShardManifest::checked_tokenizer() const {
  for (const Json& file : tokenizer_files) {
    const auto name = file.at("file").get<std::string>();
    const std::string copy = sibling(path, name);
    if (!fs::is_regular_file(copy)) fail("{}: its shards hold the tokens of {}, which is gone", path, copy);
    const Json now = describe_files({{name, read_file(copy)}})[0];
    if (now != file)
      fail("{}: {} is not the tokenizer of its shards any more: it is {}, the manifest has {}", path, copy, brief(now),
           brief(file));
  }
  return tokenizer;
}

Json describe_files(const std::vector<Tokenizer::File>& files) {
  Json described = Json::array();
  for (const Tokenizer::File& file : files)
    described.push_back({{"file", file.name},
                         {"bytes", file.content.size()},
                         {"crc32", fmt::format("{:08x}", crc32_z(0, reinterpret_cast<const Bytef*>(file.content.data()),
                                                                 file.content.size()))}});
  return described;
}

std::optional<ShardManifest> read_manifest(const std::string& folder) {
  ShardManifest manifest;
  manifest.path = (fs::path(folder) / kManifest).string();
  if (!fs::is_regular_file(manifest.path)) return std::nullopt;
  const Json json = parse_json(read_file(manifest.path), manifest.path);
  if (!json.is_object() || !json.contains("format") || !json.contains("tokenizer") || !json.contains("train"))
    return std::nullopt;
  try {
    manifest.vocab_size = json.at("vocab_size").get<int64_t>();
    read_separator(manifest, json);
    manifest.train = shards_of(manifest, json.at("train"));
    manifest.val = shards_of(manifest, json.at("val"));
    manifest.tokenizer = json.at("tokenizer").get<std::string>();
    manifest.tokenizer_files = Json::array();
    if (manifest.tokenizer != "byte") {
      manifest.tokenizer_files =
          json.contains("tokenizer_files") ? json["tokenizer_files"] : files_in(manifest.folder());
      const bool known = !checksums(manifest.tokenizer_files).empty();
      manifest.tokenizer =
          known ? sibling(manifest.path, manifest.tokenizer_files[0].at("file").get<std::string>()) : "";
    }
  } catch (const Json::exception& e) { fail("{} is damaged: {}", manifest.path, e.what()); }
  return manifest;
}

ShardOrigin find_manifests(std::span<const std::string> shards) {
  std::map<std::string, std::optional<ShardManifest>> by_folder;
  const auto manifest_in = [&](const std::string& folder) -> const std::optional<ShardManifest>& {
    const auto [it, fresh] = by_folder.try_emplace(folder);
    if (fresh) it->second = read_manifest(folder);
    return it->second;
  };
  ShardOrigin origin;
  for (const std::string& shard : shards) {
    // The manifest that lists this shard. The shard may be a symbolic link: the link's folder is searched first, then
    // the target's folder.
    const ShardManifest* found = nullptr;
    for (const fs::path& path : {fs::path(shard), fs::canonical(shard)})
      if (const auto& manifest = manifest_in(path.parent_path().string());
          found == nullptr && manifest && lists(*manifest, path))
        found = &*manifest;
    if (found == nullptr || found->tokenizer.empty()) origin.unlisted.push_back(shard);
    if (found == nullptr || !same_separator(origin.manifests.empty() ? *found : origin.manifests.front(), *found))
      origin.without_separator.push_back(shard);
    if (found != nullptr && std::none_of(origin.manifests.begin(), origin.manifests.end(),
                                         [&](const ShardManifest& m) { return m.path == found->path; })) {
      origin.manifests.push_back(*found);
    }
  }
  return origin;
}

std::vector<std::string> expand_shards(std::span<const std::string> patterns, ShardSplit split) {
  std::vector<std::string> files;
  for (const std::string& pattern : patterns) {
    const std::optional<ShardManifest> manifest = fs::is_directory(pattern) ? read_manifest(pattern) : std::nullopt;
    if (!manifest) {
      files.push_back(pattern);
      continue;
    }
    const std::vector<std::string>& listed = split == ShardSplit::train ? manifest->train : manifest->val;
    TRIAD_CHECK(!listed.empty(), "{} lists no {} shards", manifest->path, split == ShardSplit::train ? "train" : "val");
    files.insert(files.end(), listed.begin(), listed.end());
  }
  return expand_globs(files);
}

}  // namespace triad
