// Data files that are truncated, damaged or rewritten, or whose disk fails, while a program reads them: the error names
// the file and the offset, and the run can be resumed.
#include <fmt/format.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <utility>
#include <vector>

#include "io/data/dataset.h"
#include "io/data/shards.h"
#include "io/json_config.h"
#include "io/safetensors.h"
#include "tests/support/corpus.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kHeaderBytes = 1024;

void write_constant_shard(const std::string& path, int64_t tokens, int32_t token) {
  ShardWriter writer(path, TokenWidth::u16);
  writer.append(std::vector<int32_t>(static_cast<size_t>(tokens), token));
  writer.finish();
}

// Overwrites the file in place with another shard's bytes, so programs that have it open read the new ones. The file
// gets its new length last and is never shorter meanwhile, so a reader finds old or new tokens, but no early end.
void rewrite(const std::string& path, int64_t tokens, int32_t token) {
  write_constant_shard(path + ".other", tokens, token);
  const std::string bytes = read_text(path + ".other");
  std::fstream(path, std::ios::binary | std::ios::in | std::ios::out) << bytes;
  fs::resize_file(path, bytes.size());
}

std::string on_shard(const std::string& path) {
  return "--set data.kind=shards --set data.paths=" + path + " --set train.save_every=10 --set train.keep_last=2 ";
}
const std::string kLong = "--set train.steps=1000000 --set train.allow_unsafe=true ";

}  // namespace

TEST_CASE("data faults: a shard that changes under a run ends it, and a resume goes on", "[data][waits]") {
  constexpr int64_t kTokens = 20'000;
  struct Fault {
    const char* name;
    std::function<void(const std::string& shard)> make;
    std::vector<std::string> says;
  };
  const Fault faults[] = {
      {"cut",
       [](const std::string& shard) { fs::resize_file(shard, kHeaderBytes + 200); },
       {"cannot be read at offset", "the file ends before"}},
      {"emptied",
       [](const std::string& shard) { fs::resize_file(shard, 0); },
       {"cannot be read at offset", "the file ends before"}},
      {"bad disk",
       [](const std::string& shard) { write_text(shard + ".bad", ""); },
       {"cannot be read at offset", "Input/output error"}},
      {"rewritten",
       [](const std::string& shard) { rewrite(shard, kTokens, 60'000); },
       {"token 60000 at offset", "expected 0..255"}},
  };
  for (const Fault& fault : faults) {
    const TemporaryFolder folder;
    const std::string shard = folder.file("part.bin"), out = folder.file("run"), log = folder.file("log");
    INFO(fault.name);
    write_constant_shard(shard, kTokens, 7);
    BackgroundProgram program(train_args(out, on_shard(shard) + kLong), with_faults("TRIAD_BAD_DISK=" + shard), log);
    wait_for_text(out + "/training.csv", "\n12,");
    fault.make(shard);
    CHECK(program.wait() == 1);
    const std::string text = read_text(log);
    INFO(text);
    CHECK(has(text, shard + ": "));
    for (const std::string& part : fault.says) CHECK(has(text, part));

    fs::remove(shard + ".bad");
    rewrite(shard, kTokens, 7);
    const std::string newest = fs::read_symlink(out + "/checkpoints/latest").filename().string();
    const int step = std::stoi(newest.substr(newest.find('_') + 1));
    CHECK(step >= 10);
    const Outcome resumed =
        run_program(train_args(out, on_shard(shard) + fmt::format("--set train.steps={} --resume latest", step + 2)));
    INFO(resumed.output);
    CHECK(resumed.exit_code == 0);
  }
}

TEST_CASE("data faults: files that change under their readers", "[io]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("part.bin");
  write_constant_shard(path, 1000, 5);
  const auto source = shard_data({.paths = {path}, .val_paths = {}}, 100).train;
  const Shard shard(path);
  std::vector<int32_t> tokens(1000);
  rewrite(path, 1000, 100);
  check_error([&] { source->read(10, std::span(tokens).first(20)); }, {path, "token 100 at offset 1044", "0..99"});
  check_error([&] { shard.scan(100); }, {path, "token 100 at offset 1024"});
  fs::resize_file(path, kHeaderBytes + 2 * 600);
  check_error([&] { source->read(0, tokens); }, {path, "offset 2224", "ends before", "3024 bytes"});
  check_error([&] { shard.max_token(); }, {path, "offset 2224"});
  // A file that is replaced by a rename is still read as it was opened.
  write_constant_shard(folder.file("new.bin"), 1000, 6);
  rewrite(path, 1000, 5);
  fs::rename(folder.file("new.bin"), path);
  source->read(0, tokens);
  CHECK(tokens == std::vector<int32_t>(1000, 5));

  const std::string weights = folder.file("w.safetensors");
  const std::vector<float> values(3000, 1.5f);
  write_safetensors(weights, std::vector<HostTensor>{{{"w", DType::f32, {3000}}, values.data()}});
  const SafetensorsFile file(weights);
  fs::resize_file(weights, 8000);
  check_error([&] { file.read(file.at("w")); }, {weights, "offset 8000", "ends before"});
}

TEST_CASE("data faults: shards that differ from their manifest are refused, with what differs", "[data]") {
  struct Fault {
    const char* name;
    std::function<void(const std::string& out)> make;
    std::vector<std::string> says;
  };
  const auto change = [](const std::string& path, int64_t at, char by) {
    std::string bytes = read_text(path);
    bytes[static_cast<size_t>(at < 0 ? static_cast<int64_t>(bytes.size()) + at : at)] ^= by;
    write_text(path, bytes);
  };
  const auto set = [](const std::string& out, const char* split, const char* key, const Json& value) {
    Json manifest = parse_json(read_text(out + "/manifest.json"), "manifest");
    Json& object = manifest[split];
    (key == std::string("documents") ? object : object["shards"][0])[key] = value;
    write_text(out + "/manifest.json", manifest.dump());
  };
  const Fault faults[] = {
      {"a token changed",
       [&](const std::string& out) { change(out + "/train_000001.bin", kHeaderBytes + 100, 1); },
       {"train_000001.bin: its CRC-32 is", "manifest.json says", "has changed"}},
      {"a token to evaluate on changed",
       [&](const std::string& out) { change(out + "/val_000000.bin", kHeaderBytes + 100, 1); },
       {"val_000000.bin: its CRC-32 is"}},
      {"a bit of the mask changed",
       [&](const std::string& out) { change(out + "/train_000000.bin", -9, 1); },
       {"train_000000.bin: it has", "learned tokens, but", "manifest.json says"}},
      {"two bytes of the mask swapped",
       [&](const std::string& out) {
         std::string bytes = read_text(out + "/train_000000.bin");
         const size_t mask = bytes.size() - 250, other = bytes.find_first_not_of(bytes[mask], mask);
         std::swap(bytes[mask], bytes[other]);
         write_text(out + "/train_000000.bin", bytes);
       },
       {"train_000000.bin: its CRC-32 is"}},
      {"cut, with a header that fits",
       [&](const std::string& out) {
         const std::string path = out + "/train_000000.bin";
         ShardWriter writer(path, {.width = TokenWidth::u32, .masked = true, .vocab = 256});
         writer.append(std::vector<int32_t>(1000, 7), std::vector<uint8_t>(1000, 1));
         writer.finish();
       },
       {"train_000000.bin: it has 1000 tokens, but", "manifest.json says 2000"}},
      {"swapped",
       [&](const std::string& out) {
         fs::rename(out + "/train_000000.bin", out + "/x");
         fs::rename(out + "/train_000001.bin", out + "/train_000000.bin");
         fs::rename(out + "/x", out + "/train_000001.bin");
       },
       {"train_000000.bin: i"}},
      {"more documents",
       [&](const std::string& out) { set(out, "train", "documents", 4000); },
       {"manifest.json: it says that", "hold 4000 documents, but they have"}},
      {"bytes", [&](const std::string& out) { set(out, "train", "bytes", 9999); }, {"bytes, but", "says 9999"}},
      {"a shard for both",
       [&](const std::string& out) {
         fs::copy_file(out + "/train_000000.bin", out + "/val_000000.bin", fs::copy_options::overwrite_existing);
         Json manifest = parse_json(read_text(out + "/manifest.json"), "manifest");
         Json shard = manifest["train"]["shards"][0];
         shard["file"] = "val_000000.bin";
         manifest["val"]["shards"] = Json::array({shard});
         manifest["val"].erase("documents");
         write_text(out + "/manifest.json", manifest.dump());
       },
       {"val_000000.bin", "train_000000.bin", "may not overlap"}},
      {"a name for both",
       [&](const std::string& out) { set(out, "val", "file", "train_000000.bin"); },
       {"manifest.json is damaged: it lists the shard train_000000.bin twice"}},
  };
  for (const Fault& fault : faults) {
    const TemporaryFolder folder;
    INFO(fault.name);
    std::string text;
    for (int i = 0; i < 400; ++i)
      text +=
          Json{{"prompt", fmt::format("what is {}?", i)}, {"completion", fmt::format("{} is {}", i, i)}}.dump() + "\n";
    write_text(folder.file("a.jsonl"), text);
    const std::string out = folder.file("out");
    run_data("--input " + folder.file("a.jsonl") + " --shard-tokens 2000 --out " + out);
    const SplitOptions options{.paths = {out}, .val_paths = {out}};
    CHECK_NOTHROW(shard_data(options, 256));
    fault.make(out);
    check_error([&] { shard_data(options, 256); }, fault.says);
  }
}

TEST_CASE("data faults: the work of a start is linear in the number of shards", "[data]") {
  // Shards in separate splits and folders, one manifest for all, `n` training and n / 4 validation shards.
  const auto work = [](int n) {
    const TemporaryFolder folder;
    const std::string out = folder.file("shards"), counts = folder.file("counts");
    fs::create_directory(out);
    Json manifest = {{"format", "llm.c u16"}, {"tokenizer", "byte"}, {"vocab_size", 256}, {"eot", 0}};
    for (const char* split : {"train", "val"}) {
      Json shards = Json::array();
      const int split_documents = split == std::string("train") ? n : n / 4;
      for (int i = 0; i < split_documents; ++i) {
        const std::string file = fmt::format("{}_{:06}.bin", split, i);
        const int32_t header[] = {20240520, 1, 50};
        std::string bytes(reinterpret_cast<const char*>(header), sizeof header);
        bytes.resize(kHeaderBytes);
        // Tokens that spell the file's name, so that no two shards are equal.
        const std::string text = '\0' + file + std::string(49 - file.size(), 'x');
        for (const char token : text) bytes += {token, '\0'};
        write_text(out + "/" + file, bytes);
        shards.push_back({{"file", file}, {"tokens", 50}});
      }
      manifest[split] = {{"documents", split_documents}, {"shards", shards}};
    }
    write_text(out + "/manifest.json", manifest.dump());
    const Outcome outcome = run_program(
        train_args(folder.file("run"), "--set data.kind=shards --set train.steps=1 --set data.paths=" + out),
        with_faults("TRIAD_COUNT_CALLS=" + counts));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    const Json json = parse_json(read_text(counts), "counts");
    return std::pair(json["stat"].get<double>(), json["malloc"].get<double>());
  };
  const auto [stats, mallocs] = work(400);
  const auto [more_stats, more_mallocs] = work(1200);
  INFO(stats << " and " << more_stats << " calls of stat, " << mallocs << " and " << more_mallocs << " of malloc");
  CHECK(stats > 400);
  CHECK(mallocs > 400);
  constexpr double kMost = 3.3;  // three times as many shards; the rest of the run doesn't grow
  CHECK(more_stats < kMost * stats);
  CHECK(more_mallocs < kMost * mallocs);
}

TEST_CASE("data faults: more shards than a process may open files by default", "[io]") {
  const TemporaryFolder folder;
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  constexpr rlim_t kFew = 64;
  const rlimit few{kFew, before.rlim_max};
  for (int i = 0; i < 80; ++i) write_constant_shard(folder.file(fmt::format("{:03}.bin", i)), 3, i);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
  const auto source = shard_data({.paths = {folder.file("*.bin")}, .val_paths = {}}, 100).train;
  std::vector<int32_t> last(1);
  source->read(239, last);
  CHECK(last[0] == 79);
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
}
