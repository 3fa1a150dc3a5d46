// Helpers for `triad data` tests: input texts, compressed and not, and the shards that a call writes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace triad::test {

std::string gzip(const std::string& text, size_t members = 1);  // the text in that many gzip members
std::string zstd(const std::string& text);

// JSONL lines with some blank lines and empty texts; a few documents are longer than a pipeline piece.
std::string jsonl(size_t lines, uint32_t seed);

// Files in a folder: name -> contents.
std::map<std::string, std::string> files_of(const std::string& folder);

void run_data(const std::string& args);  // runs `triad data ARGS` and requires exit code 0

// The text in the shards PREFIX_*.bin of a folder, which hold byte tokens; a document begins with a NUL.
std::string shard_text(const std::string& folder, const std::string& prefix);

}  // namespace triad::test
