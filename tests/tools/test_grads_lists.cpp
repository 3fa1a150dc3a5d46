// triad grads --lists FILE: attention to the lists of a file, and the files that it refuses.
#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "tests/support/dist_run.h"
#include "tests/support/grads_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kBatch = 2, kLength = 48;

// A model and two token shards.
struct ListsSetup {
  TemporaryFolder folder;
  std::string lists = folder.file("lists.safetensors"), out = folder.file("out.safetensors");

  ListsSetup() {
    REQUIRE(run_program("init " + kTiny + " --out " + folder.file("init")).exit_code == 0);
    for (const int32_t factor : {1, 3}) {
      std::vector<int32_t> tokens;
      for (int32_t i = 0; i < kBatch * (kLength + 1); ++i) tokens.push_back((factor * i * i + 3 * i + 5) % 256);
      write_shard(folder.file(factor == 1 ? "one.bin" : "two.bin"), tokens);
    }
  }
  Outcome grads(const std::string& shard, const std::string& to, const std::string& more = "",
                int64_t batch = kBatch) const {
    return run_program("grads --device cpu --checkpoint " + folder.file("init") + " --tokens " + folder.file(shard) +
                       " --batch " + std::to_string(batch) + " --seq " + std::to_string(kLength) + " --out " + to +
                       " " + more);
  }
};

void require_ok(const Outcome& outcome) {
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
}

using Ids = std::vector<int32_t>;
Ids ids_of(const SafetensorsFile& file, const std::string& name) {
  const TensorEntry& entry = file.at(name);
  Ids ids(static_cast<size_t>(entry.numel()));
  file.read(entry, std::as_writable_bytes(std::span(ids)));
  return ids;
}
struct Lists {
  Ids ids;
  Shape shape;
};
using File = std::map<std::string, Lists>;

// Writes a file of lists.
void write_lists(const std::string& path, const File& file, DType dtype = DType::i32) {
  std::vector<HostTensor> tensors;
  for (const auto& [name, lists] : file) tensors.push_back({{name, dtype, lists.shape}, lists.ids.data()});
  write_safetensors(path, tensors);
}

}  // namespace

TEST_CASE("grads: --lists attends to the lists of a file", "[tools]") {
  const ListsSetup s;
  const std::string f64 = "--dtype f64 ", with = " --lists " + s.lists;
  require_ok(s.grads("one.bin", s.lists, f64));
  require_ok(s.grads("one.bin", s.out, f64 + with));
  CHECK(same_file(s.lists, s.out));  // what it selects itself
  // Other tokens, which would select other blocks.
  const std::string selected = s.folder.file("selected.safetensors");
  require_ok(s.grads("two.bin", selected, f64));
  require_ok(s.grads("two.bin", s.out, f64 + with));
  const auto given = read_grads(s.lists), own = read_grads(selected), got = read_grads(s.out);
  for (const char* name : {"block_index/0", "block_index/1"}) {
    INFO(name);
    CHECK(own.at(name).ids != given.at(name).ids);
    CHECK(got.at(name).ids == given.at(name).ids);
  }
  CHECK((got.at("loss").floats != own.at("loss").floats));
  CHECK((got.at("grad/embed.weight").floats != own.at("grad/embed.weight").floats));
  // Gradients in bf16 and in fp8 at equal lists.
  for (const std::string dtype : {"bf16", "fp8"}) {
    require_ok(s.grads("two.bin", s.out, "--dtype " + dtype + with));
    CHECK(ids_of(SafetensorsFile(s.out), "block_index/1") == given.at("block_index/1").ids);
  }
}

TEST_CASE("grads: --lists counts blocks from the document's first token", "[tools]") {
  const ListsSetup s;
  write_bounds(s.folder.file("bounds.i32"), {0, 7, 30, 31, 48});
  const std::string documents = "--dtype f64 --documents " + s.folder.file("bounds.i32");
  require_ok(s.grads("one.bin", s.lists, documents, 1));
  require_ok(s.grads("one.bin", s.out, documents + " --lists " + s.lists, 1));
  CHECK(same_file(s.lists, s.out));
  write_bounds(s.folder.file("bounds.i32"), {0, 7, 48});
  require_ok(s.grads("one.bin", s.out, documents + " --lists " + s.lists, 1));  // earlier blocks exist there, too
  write_bounds(s.folder.file("bounds.i32"), {0, 7, 30, 40, 48});
  const Outcome outcome = s.grads("one.bin", s.out, documents + " --lists " + s.lists, 1);
  INFO(outcome.output);
  CHECK(outcome.exit_code == 2);
  CHECK(has(outcome.output, "row 0, token 40, group 0: block 1 is in the future, the token is in block 0"));
}

TEST_CASE("grads: files whose lists do not fit are refused with the value", "[tools]") {
  const ListsSetup s;
  require_ok(s.grads("one.bin", s.lists));
  const SafetensorsFile source(s.lists);
  File good;
  for (const TensorEntry& entry : source.entries()) {
    if (!entry.name.starts_with("block_index/")) continue;
    good[entry.name] = {ids_of(source, entry.name),
                        {entry.shape.at(0), entry.shape.at(1), entry.shape.at(2), entry.shape.at(3)}};
  }
  REQUIRE(good.size() == 2);
  const std::string path = s.folder.file("bad.safetensors");
  const auto refused = [&](const std::vector<std::string>& words, const std::string& more = "") {
    const Outcome outcome = s.grads("one.bin", s.out, "--lists " + path + " " + more);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 2);
    CHECK(has(outcome.output, path));
    for (const std::string& word : words) {
      INFO(word);
      CHECK(has(outcome.output, word));
    }
    CHECK_FALSE(fs::exists(s.out));
  };
  const auto changed = [&](const std::function<void(File&)>& change, const std::vector<std::string>& words) {
    File file = good;
    change(file);
    write_lists(path, file);
    refused(words);
  };
  write_lists(path, good);
  require_ok(s.grads("one.bin", s.out, "--lists " + path));
  fs::remove(s.out);
  changed([](File& f) { f.erase("block_index/1"); }, {"block_index/1", "no tensor"});
  changed([](File& f) { f["block_index/2"] = f["block_index/1"]; }, {"block_index/2", "no lists of that name"});
  changed([](File& f) { f["block_index/01"] = f["block_index/1"]; }, {"block_index/01", "no lists of that name"});
  changed(
      [](File& f) {
        Shape& shape = f["block_index/0"].shape;
        shape = {shape[1], shape[0], shape[2], shape[3]};
      },
      {"block_index/0 is I32[48,2,", "expected I32[2,48,"});
  // The list of row 1's last token in the last group.
  const auto last = [&](const Ids& list, const std::vector<std::string>& words) {
    changed([&](File& f) { std::copy(list.begin(), list.end(), f["block_index/1"].ids.end() - 4); }, words);
  };
  last({0, 1, 4, 99}, {"block_index/1: row 1, token 47", "block 99 is in the future"});
  last({0, 2, 1, 5}, {"row 1, token 47", "block 1 stands after 2"});
  last({0, 2, 2, 5}, {"block 2 stands after 2"});
  last({0, 4, -1, 5}, {"block 5 stands after -1"});
  last({-1, 0, 1, 5}, {"block 0 stands after -1"});
  last({0, 1, -2, -1}, {"block -2 is not a block"});
  changed([](File& f) { f["block_index/0"].ids[1] = 1; },
          {"block_index/0: row 0, token 0, group 0", "block 1 is in the"});
  write_lists(path, good, DType::f32);
  refused({"F32[2,48,", "expected I32"});
  write_lists(path, good);
  refused({"--dense"}, "--dense");
  refused({"--context is 2"}, "--context 2");
  const Outcome missing = s.grads("one.bin", s.out, "--lists " + s.folder.file("none"));
  CHECK(missing.exit_code == 1);
  CHECK(has(missing.output, s.folder.file("none")));
}
