#include "io/data/shard_manifest.h"

#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>
#include <map>
#include <system_error>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/data/text_input.h"
#include "io/file.h"
#include "io/file_name.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

constexpr const char* kManifest = "manifest.json";

std::string sibling(const fs::path& manifest, const std::string& name) {
  return (manifest.parent_path() / name).string();
}

// An object in a manifest. Its values are checked for their type; an error names file, key and value.
class Fields {
 public:
  // name: the object's key after those that lead to it, "train"; empty for the whole file.
  Fields(const std::string& path, std::string name, const Json& json)
      : path_(path), name_(std::move(name)), json_(json) {
    if (!json.is_object()) refuse(name_, json, "an object");
  }
  bool has(const char* key) const { return json_.contains(key); }
  std::string text(const char* key) const {
    const Json& value = at(key);
    if (!value.is_string()) refuse(name_of(key), value, "a string");
    return value.get<std::string>();
  }
  // An integer in [least, most].
  int64_t integer(const char* key, int64_t least, int64_t most) const {
    const Json& value = at(key);
    const bool fits = !value.is_number_unsigned() || value.get<uint64_t>() <= static_cast<uint64_t>(most);
    if (!value.is_number_integer() || !fits || value.get<int64_t>() < least || value.get<int64_t>() > most)
      refuse(name_of(key), value, fmt::format("an integer from {} to {}", least, most));
    return value.get<int64_t>();
  }
  std::optional<int64_t> optional_integer(const char* key, int64_t most) const {
    return has(key) ? std::optional(integer(key, 0, most)) : std::nullopt;
  }
  // A file name in the manifest's folder.
  std::string file_name(const char* key) const {
    const std::string name = text(key);
    if (!is_file_name(name)) refuse(name_of(key), at(key), "a file name without a path");
    return name;
  }
  // A CRC-32 as 8 hexadecimal digits.
  std::optional<uint32_t> checksum(const char* key) const {
    if (!has(key)) return std::nullopt;
    constexpr size_t kDigits = 8;
    const std::string digits = text(key);
    const char* const end = digits.data() + digits.size();
    uint32_t value = 0;
    const auto [read, error] = std::from_chars(digits.data(), end, value, 16);
    if (digits.size() != kDigits || read != end || error != std::errc())
      refuse(name_of(key), at(key), "a CRC-32 as 8 hexadecimal digits");
    return value;
  }
  Fields object(const char* key) const { return {path_, name_of(key), at(key)}; }
  // A list's elements, each an object.
  std::vector<Fields> objects(const char* key) const {
    const Json& list = at(key);
    if (!list.is_array()) refuse(name_of(key), list, "a list");
    std::vector<Fields> all;
    for (size_t i = 0; i < list.size(); ++i) all.emplace_back(path_, fmt::format("{}[{}]", name_of(key), i), list[i]);
    return all;
  }

 private:
  std::string name_of(const char* key) const { return name_.empty() ? key : name_ + "." + key; }
  const Json& at(const char* key) const {
    if (!has(key)) fail("{} is damaged: its {} is absent", path_, name_of(key));
    return json_[key];
  }
  [[noreturn]] void refuse(const std::string& name, const Json& value, const std::string& needed) const {
    fail("{} is damaged: its {} is {}: {} is needed", path_, name, brief(value), needed);
  }

  const std::string& path_;
  std::string name_;
  const Json& json_;
};

constexpr int64_t kMostCount = int64_t{1} << 53;

// Reads a split's shards and document count.
void read_split(ShardManifest& manifest, const Fields& root, ShardSplit which) {
  const bool train = which == ShardSplit::train;
  const Fields split = root.object(train ? "train" : "val");
  for (const Fields& shard : split.objects("shards")) {
    const std::string file = shard.file_name("file");
    const bool fresh = manifest.listed
                           .try_emplace(file, ListedShard{.split = which,
                                                          .tokens = shard.optional_integer("tokens", kMostCount),
                                                          .bytes = shard.optional_integer("bytes", kMostCount),
                                                          .learned = shard.optional_integer("learned", kMostCount),
                                                          .crc32 = shard.checksum("crc32")})
                           .second;
    TRIAD_CHECK(fresh, "{} is damaged: it lists the shard {} twice", manifest.path, shortened(file));
    (train ? manifest.train : manifest.val).push_back(sibling(manifest.path, file));
  }
  (train ? manifest.train_documents : manifest.val_documents) = split.optional_integer("documents", kMostCount);
}

// eot: a token in the vocabulary, or -1 (unknown), which is also the default.
void read_separator(ShardManifest& manifest, const Fields& fields) {
  if (fields.has("eot")) manifest.eot = static_cast<int32_t>(fields.integer("eot", -1, manifest.vocab_size - 1));
  const std::string position = fields.has("eot_position") ? fields.text("eot_position") : "first";
  if (position != "first" && position != "last")
    fail("{}: its eot_position is \"{}\": first or last is allowed", manifest.path, shortened(position));
  manifest.separator = position == "last" ? Separator::last : Separator::first;
}

// Sizes and checksums of the files without their names, because a tokenizer may be read from files with other names.
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

// A manifest's `tokenizer_files`, or those in its folder if it has no such key; null: unknown.
Json read_tokenizer_files(const ShardManifest& manifest, const Fields& fields, const Json& json) {
  if (!fields.has("tokenizer_files")) return files_in(manifest.folder());
  for (const Fields& file : fields.objects("tokenizer_files")) {
    file.file_name("file");
    file.text("crc32");
    file.integer("bytes", 0, std::numeric_limits<int64_t>::max());
  }
  return json["tokenizer_files"];
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
  const Fields fields(manifest.path, "", json);
  manifest.tokenizer = fields.text("tokenizer");
  manifest.vocab_size = fields.integer("vocab_size", 1, std::numeric_limits<int32_t>::max());
  read_separator(manifest, fields);
  if (fields.has("chat")) manifest.chat = json["chat"];
  read_split(manifest, fields, ShardSplit::train);
  read_split(manifest, fields, ShardSplit::val);
  manifest.tokenizer_files = Json::array();
  if (manifest.tokenizer != "byte") {
    manifest.tokenizer_files = read_tokenizer_files(manifest, fields, json);
    const bool known = !manifest.tokenizer_files.empty();
    manifest.tokenizer = known ? sibling(manifest.path, manifest.tokenizer_files[0].at("file").get<std::string>()) : "";
  }
  return manifest;
}

// Linear in the shards: there may be ten thousands.
ShardOrigin find_manifests(std::span<const std::string> shards) {
  std::unordered_map<std::string, std::optional<ShardManifest>> by_folder;
  const auto manifest_in = [&](const std::string& folder) -> const std::optional<ShardManifest>& {
    const auto [it, fresh] = by_folder.try_emplace(folder);
    if (fresh) it->second = read_manifest(folder);
    return it->second;
  };
  std::unordered_map<std::string, size_t> numbers;  // manifest path -> number in origin.manifests
  ShardOrigin origin;
  for (const std::string& shard : shards) {
    // The manifest that lists this shard. The shard may be a symbolic link: the link's folder is searched first, then
    // the target's folder.
    const ShardManifest* found = nullptr;
    const ListedShard* listed = nullptr;
    for (const bool target : {false, true}) {
      if (found != nullptr) break;
      const fs::path path = target ? fs::canonical(shard) : fs::path(shard);
      const auto& manifest = manifest_in(path.parent_path().string());
      if (!manifest) continue;
      const auto entry = manifest->listed.find(path.filename().string());
      if (entry != manifest->listed.end()) found = &*manifest, listed = &entry->second;
    }
    if (found == nullptr || found->tokenizer.empty()) origin.unlisted.push_back(shard);
    if (found == nullptr || !same_separator(origin.manifests.empty() ? *found : origin.manifests.front(), *found))
      origin.without_separator.push_back(shard);
    std::optional<ShardOrigin::Entry>& entry = origin.entries.emplace_back();
    if (found == nullptr) continue;
    const auto [number, fresh] = numbers.try_emplace(found->path, origin.manifests.size());
    if (fresh) origin.manifests.push_back(*found);
    entry = {number->second, *listed};
  }
  return origin;
}

std::vector<WholeSplit> ShardOrigin::whole_splits() const {
  std::map<std::pair<size_t, ShardSplit>, std::vector<size_t>> found;
  for (size_t i = 0; i < entries.size(); ++i)
    if (entries[i]) found[{entries[i]->manifest, entries[i]->shard.split}].push_back(i);
  std::vector<WholeSplit> whole;
  for (auto& [key, shards] : found) {
    const ShardManifest& manifest = manifests[key.first];
    const bool train = key.second == ShardSplit::train;
    const std::optional<int64_t> documents = train ? manifest.train_documents : manifest.val_documents;
    if (documents && shards.size() == (train ? manifest.train : manifest.val).size())
      whole.push_back({.manifest = manifest.path, .shards = std::move(shards), .documents = *documents});
  }
  return whole;
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
  files = expand_globs(files);
  refuse_streams(files);
  return files;
}

}  // namespace triad
