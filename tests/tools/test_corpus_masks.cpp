// `triad data` on JSONL that isn't all learned: masked shards, which equal the text read directly.
#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <vector>

#include "io/data/dataset.h"
#include "io/data/shards.h"
#include "io/file.h"
#include "io/json_config.h"
#include "tests/support/corpus.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace fs = std::filesystem;

namespace {

// Every kind of record; the first one is masked.
std::string records(int n) {
  std::string text;
  for (int i = 0; i < n; ++i) {
    const std::string words(static_cast<size_t>(1 + i * 7 % 60), static_cast<char>('a' + i % 26));
    if (i % 3 == 0) text += Json{{"prompt", "Q" + words}, {"completion", "A" + words}}.dump();
    if (i % 3 == 1)
      text += Json{{"messages",
                    {{{"role", "user"}, {"content", words}},
                     {{"role", i % 2 == 0 ? "assistant" : "system"}, {"content", words + "!"}}}}}
                  .dump();
    if (i % 3 == 2) text += Json{{"text", words}}.dump();
    text += "\n";
  }
  return text;
}

// A source's tokens, each with whether it is learned.
std::vector<std::pair<int32_t, bool>> all_of(const TokenSource& source) {
  std::vector<int32_t> tokens(static_cast<size_t>(source.size()));
  source.read(0, tokens);
  std::vector<std::pair<int32_t, bool>> all;
  for (size_t i = 0; i < tokens.size(); ++i)
    all.emplace_back(tokens[i], source.mask().learned(static_cast<int64_t>(i)));
  return all;
}

Json manifest_of(const std::string& folder) { return parse_json(read_file(folder + "/manifest.json"), "manifest"); }

std::shared_ptr<const TokenSource> shards_of(const std::string& folder, const std::string& split) {
  return shard_data({.paths = {folder + "/" + split + "_*.bin"}, .val_paths = {}}, 256).train;
}

}  // namespace

TEST_CASE("corpus: shards of masked records equal their text, with the counts of the manifest", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.jsonl"), records(400));
  run_data("--val-fraction 0 --shard-tokens 1001 --input " + folder.file("a.jsonl") + " --out " + folder.file("out"));
  const auto shards = shards_of(folder.file("out"), "train");
  const auto texts = text_data({.paths = {folder.file("a.jsonl")}, .val_paths = {}}, *make_tokenizer("byte")).train;
  CHECK(!shards->mask().empty());
  CHECK(all_of(*shards) == all_of(*texts));
  CHECK(shards->documents()->begins == texts->documents()->begins);
  CHECK(shards->documents()->after_end == texts->documents()->after_end);
  const Json manifest = manifest_of(folder.file("out"));
  CHECK(manifest["format"] == "llmq u32 with a mask");
  const int64_t learned = texts->mask().count(0, texts->size());
  CHECK(learned < texts->size() * 9 / 10);
  CHECK(learned > texts->size() / 3);
  CHECK(manifest["train"]["learned"] == learned);
  REQUIRE(manifest["train"]["shards"].size() > 10);
  for (const Json& entry : manifest["train"]["shards"]) {
    const std::string bytes = read_text(folder.file("out/" + entry["file"].get<std::string>()));
    CHECK(entry["bytes"] == bytes.size());
    CHECK(entry["crc32"] ==
          fmt::format("{:08x}", crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size())));
  }
  for (const auto& [name, content] : files_of(folder.file("out"))) CHECK(!name.ends_with(".mask"));
  const Outcome inspected = run_program("inspect " + folder.file("out"));
  CHECK(has(inspected.output, fmt::format("{} of them learned", learned)));
  CHECK(has(inspected.output, "with a mask"));
  const Shard first(folder.file("out/train_000000.bin"));
  const int64_t first_learned = first.mask().count(0, first.size());
  CHECK(has(run_program("inspect " + first.path()).output,
            fmt::format("loss mask: {} tokens are learned, {:.2f}%", first_learned,
                        100.0 * static_cast<double>(first_learned) / static_cast<double>(first.size()))));
}

TEST_CASE("corpus: a call on masked records that is interrupted and repeated writes the same shards", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.jsonl"), records(60'000));  // several pipeline pieces
  const std::string data = " | " TRIAD_PROGRAM " data --save-seconds 0 --shard-tokens 700000 --input - --out ";
  REQUIRE(run_command("cat " + folder.file("a.jsonl") + data + folder.file("whole")).exit_code == 0);
  for (const int lines : {20'000, 45'000}) {
    const Outcome cut = run_command("(head -" + std::to_string(lines) + " " + folder.file("a.jsonl") + "; echo '{')" +
                                    data + folder.file("cut"));
    INFO(cut.output);
    CHECK(cut.exit_code == 1);
    CHECK(fs::exists(folder.file("cut/unfinished.json")));
  }
  const Outcome rest = run_command("cat " + folder.file("a.jsonl") + data + folder.file("cut"));
  INFO(rest.output);
  REQUIRE(rest.exit_code == 0);
  CHECK(has(rest.output, "resumes after"));
  CHECK(files_of(folder.file("cut")) == files_of(folder.file("whole")));
}

TEST_CASE("corpus: a shard with a mask continues from its paused state, finished since or not", "[data]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("train_000000.bin");
  const ShardLayout layout = {.width = TokenWidth::u32, .masked = true, .vocab = 256};
  std::vector<int32_t> tokens;
  std::vector<uint8_t> learned;
  for (int32_t i = 0; i < 100; ++i) tokens.push_back(i), learned.push_back(static_cast<uint8_t>(i * i % 7 < 3));
  const auto append = [&](ShardWriter& writer, size_t begin, size_t end) {
    writer.append(std::span(tokens).subspan(begin, end - begin), std::span(learned).subspan(begin, end - begin));
  };
  ShardWriter::Progress progress;
  {
    ShardWriter writer(path, layout);
    append(writer, 0, 37);
    progress = writer.pause();
    append(writer, 37, 61);
    writer.pause();  // a later state, which the caller did not keep
  }
  for (int i = 0; i < 2; ++i) {  // the second time the finished shard is there, and the mask file is gone
    CHECK(fs::exists(path + ".mask") == (i == 0));
    ShardWriter writer(path, layout, progress);
    append(writer, 37, 100);
    const ShardWriter::Written written = writer.finish();
    CHECK(written.learned == std::count(learned.begin(), learned.end(), 1));
    const std::string bytes = read_text(path);
    CHECK(written.crc32 == crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
    const LossMask mask = Shard(path).mask();
    for (int64_t t = 0; t < 100; ++t) CHECK(mask.learned(t) == (learned[static_cast<size_t>(t)] != 0));
  }
  {
    ShardWriter writer(path, layout);
    append(writer, 0, 37);
    progress = writer.pause();
  }
  write_text(path + ".mask", "abcd");
  check_error([&] { ShardWriter(path, layout, progress); }, {path + ".mask", "offset 4", "37 tokens"});
  check_error([&] { ShardWriter(folder.file("b.bin"), {.masked = true}); }, {"b.bin", "4 bytes"});
  ShardWriter bare(folder.file("c.bin"), layout);
  check_error([&] { bare.append(tokens); }, {"c.bin", "100 tokens", "mask of 0"});
}

TEST_CASE("corpus: held-out ends keep their masks, and shards without a mask refuse a masked record", "[data]") {
  const TemporaryFolder folder;
  const std::string pair = R"({"prompt":"abc","completion":"def"})"
                           "\n";
  write_text(folder.file("two.jsonl"), pair + R"({"prompt":"gh","completion":"i"})" + "\n");
  run_data("--val-fraction 0.01 --input " + folder.file("two.jsonl") + " --out " + folder.file("two"));
  const auto texts = text_data({.paths = {folder.file("two.jsonl")}, .val_paths = {}}, *make_tokenizer("byte")).train;
  auto expected = all_of(*texts);
  const auto train = all_of(*shards_of(folder.file("two"), "train"));
  const auto val = all_of(*shards_of(folder.file("two"), "val"));
  CHECK(train.size() == 7);
  auto joined = train;
  joined.insert(joined.end(), val.begin(), val.end());
  CHECK(joined == expected);
  CHECK(manifest_of(folder.file("two"))["val"]["learned"] == 2);  // the separator and i

  write_text(folder.file("one.jsonl"), pair);
  run_data("--val-fraction 0.3 --input " + folder.file("one.jsonl") + " --out " + folder.file("one"));
  const std::vector<std::pair<int32_t, bool>> end = {{'e', true}, {'f', true}};
  CHECK(all_of(*shards_of(folder.file("one"), "val")) == end);
  CHECK(manifest_of(folder.file("one"))["train"]["learned"] == 2);  // the first separator and d

  write_text(folder.file("mixed.jsonl"), "{\"text\":\"plain\"}\n\n" + pair);
  const Outcome mixed = run_program("data --input " + folder.file("mixed.jsonl") + " --out " + folder.file("mixed"));
  INFO(mixed.output);
  CHECK(mixed.exit_code == 1);
  CHECK(has(mixed.output, "mixed.jsonl: line 3, at offset 18"));
  CHECK(has(mixed.output, "has a loss mask"));
  CHECK(!fs::exists(folder.file("mixed/manifest.json")));
}
