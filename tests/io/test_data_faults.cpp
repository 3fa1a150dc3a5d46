// Data files that are truncated, damaged or rewritten, or whose disk fails, while a program reads them: the error names
// the file and the offset, and the run can be resumed.
#include <fmt/format.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "io/data/dataset.h"
#include "io/data/shards.h"
#include "io/safetensors.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kHeaderBytes = 1024;

void write_shard(const std::string& path, int64_t tokens, int32_t token) {
  ShardWriter writer(path, TokenWidth::u16);
  writer.append(std::vector<int32_t>(static_cast<size_t>(tokens), token));
  writer.finish();
}

// Overwrites the file in place with the bytes of another shard, so that programs that have it open read the new bytes.
// The file gets its new length last and is never shorter meanwhile, so that a reader finds old or new tokens, but no
// early end.
void rewrite(const std::string& path, int64_t tokens, int32_t token) {
  write_shard(path + ".other", tokens, token);
  const std::string bytes = read_text(path + ".other");
  std::fstream(path, std::ios::binary | std::ios::in | std::ios::out) << bytes;
  fs::resize_file(path, bytes.size());
}

std::string on_shard(const std::string& path) {
  return "--set data.kind=shards --set data.paths=" + path + " --set train.save_every=10 --set train.keep_last=2 ";
}
const std::string kLong = "--set train.steps=1000000 --set train.allow_unsafe=true ";

}  // namespace

TEST_CASE("data faults: a shard that changes under a run ends it, and a resume goes on", "[data]") {
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
    write_shard(shard, kTokens, 7);
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
  write_shard(path, 1000, 5);
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
  write_shard(folder.file("new.bin"), 1000, 6);
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

TEST_CASE("data faults: more shards than a process may open files by default", "[io]") {
  const TemporaryFolder folder;
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  constexpr rlim_t kFew = 64;
  const rlimit few{kFew, before.rlim_max};
  for (int i = 0; i < 80; ++i) write_shard(folder.file(fmt::format("{:03}.bin", i)), 3, i);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
  const auto source = shard_data({.paths = {folder.file("*.bin")}, .val_paths = {}}, 100).train;
  std::vector<int32_t> last(1);
  source->read(239, last);
  CHECK(last[0] == 79);
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
}
