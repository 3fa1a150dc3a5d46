#include "tests/support/corpus.h"

#include <fmt/format.h>
#include <zlib.h>
#include <zstd.h>

#include <filesystem>
#include <random>
#include <vector>

#include "io/data/dataset.h"
#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

namespace triad::test {

std::string gzip(const std::string& text, size_t members) {
  std::string out;
  for (size_t i = 0; i < members; ++i) {
    const std::string part =
        text.substr(text.size() * i / members, text.size() * (i + 1) / members - text.size() * i / members);
    z_stream z{};
    deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
    std::string packed(deflateBound(&z, part.size()), '\0');
    z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(part.data()));
    z.avail_in = static_cast<uInt>(part.size());
    z.next_out = reinterpret_cast<Bytef*>(packed.data());
    z.avail_out = static_cast<uInt>(packed.size());
    deflate(&z, Z_FINISH);
    packed.resize(z.total_out);
    deflateEnd(&z);
    out += packed;
  }
  return out;
}

std::string zstd(const std::string& text) {
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 3));
  return packed;
}

std::string jsonl(size_t lines, uint32_t seed) {
  std::mt19937 random(seed);
  std::string out;
  for (size_t i = 0; i < lines; ++i) {
    std::string text = fmt::format("document {} of {}: ", i, seed);
    text.append(random() % 97 == 0 ? 1'500'000 : random() % 4000, static_cast<char>('a' + random() % 26));
    if (random() % 20 == 0) text.clear();
    out += Json{{"id", i}, {"text", text}}.dump() + (random() % 9 == 0 ? "\n\n" : "\n");
  }
  return out;
}

std::map<std::string, std::string> files_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    files[entry.path().filename()] = read_text(entry.path());
  return files;
}

void run_data(const std::string& args) {
  const Outcome outcome = run_program("data " + args);
  INFO(args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
}

std::string shard_text(const std::string& folder, const std::string& prefix) {
  std::vector<int32_t> tokens;
  std::string text;
  const auto source = open_tokens({folder + "/" + prefix + "_*.bin"}, ByteTokenizer(), 256);
  tokens.resize(static_cast<size_t>(source->size()));
  source->read(0, tokens);
  for (const int32_t token : tokens) text += static_cast<char>(token);
  return text;
}

}  // namespace triad::test
