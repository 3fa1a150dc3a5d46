// Fuzzes reading manifest.json (io/data/shard_manifest.h), and a checkpoint's data file list, for which the second
// section is the JSON (io/data/data_files.h).
#include <filesystem>

#include "io/data/data_files.h"
#include "io/data/shard_manifest.h"
#include "tests/fuzz/contract.h"

namespace triad::fuzz {

namespace {

void check_split(const ShardManifest& manifest, const std::vector<std::string>& shards, ShardSplit split) {
  for (const std::string& shard : shards) {
    const std::filesystem::path path(shard);
    expect(path.parent_path() == manifest.folder(), "{}: lists {}, elsewhere", manifest.path, shard);
    const auto found = manifest.listed.find(path.filename().string());
    expect(found != manifest.listed.end() && found->second.split == split, "{}: {} is in no split, or another one",
           manifest.path, shard);
  }
}

}  // namespace

void read_manifest_file(std::string_view bytes) {
  const std::vector<std::string_view> parts = sections(bytes, 2);
  const std::string path = scratch_file("manifest.json", parts[0]);
  const auto read = read_or_refuse(path, [&] { return read_manifest(scratch_folder()); });
  if (read && *read) {
    const ShardManifest& manifest = **read;
    check_split(manifest, manifest.train, ShardSplit::train);
    check_split(manifest, manifest.val, ShardSplit::val);
    expect(manifest.listed.size() == manifest.train.size() + manifest.val.size(), "{}: {} shards in {} and {}", path,
           manifest.listed.size(), manifest.train.size(), manifest.val.size());
    expect(manifest.eot < manifest.vocab_size, "{}: separator {} of {} tokens", path, manifest.eot,
           manifest.vocab_size);
    const std::string tokenizer = manifest.tokenizer;
    expect(
        tokenizer.empty() || tokenizer == "byte" || std::filesystem::path(tokenizer).parent_path() == manifest.folder(),
        "{}: its tokenizer is {}, elsewhere", path, tokenizer);
  }
  const std::string state = scratch_file("state.json", parts[1]);
  const auto files = read_or_refuse(
      state, [&] { return files_from_json(parse_json(std::string(parts[1]), state), state + ": files"); });
  if (!files) return;
  const auto again = files_from_json(files_to_json(*files), state);
  expect(again.size() == files->size() && changed_files(*files, again).empty(), "{}: printed and read again differs",
         state);
}

}  // namespace triad::fuzz
