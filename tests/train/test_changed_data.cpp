// Resumes whose texts or shards have moved, or hold something else than the run read; and the place in packed rows that
// a checkpoint records.
#include <fmt/format.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "io/file.h"
#include "io/json_config.h"
#include "tests/support/corpus.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kHeaderBytes = 1024;

Json state_of(const std::string& checkpoint) { return parse_json(read_file(checkpoint + "/state.json"), "state.json"); }

void change_byte(const std::string& path, size_t at) {
  std::string bytes = read_text(path);
  bytes[at] = bytes[at] == 'x' ? 'y' : 'x';
  write_text(path, bytes);
}

// Changes manifest.json to what the shards in its folder hold now, as if they had been written anew.
void renew_checksums(const std::string& folder) {
  Json manifest = parse_json(read_file(folder + "/manifest.json"), "manifest");
  for (const char* split : {"train", "val"})
    for (Json& shard : manifest[split]["shards"]) shard.erase("crc32");
  write_text(folder + "/manifest.json", manifest.dump());
}

std::string lines_of(int n) {
  std::string text;
  for (int i = 0; i < n; ++i) text += Json{{"text", fmt::format("document {} of {}", i, i * i)}}.dump() + "\n";
  return text;
}

// A two-step run with a checkpoint after the first step, on one kind of data in FOLDER/data.
class Resumed {
 public:
  explicit Resumed(const std::string& kind) : kind_(kind) {
    fs::create_directory(folder_.file("data"));
    if (kind == "shards") {
      write_text(folder_.file("a.jsonl"), lines_of(400));
      run_data("--input " + folder_.file("a.jsonl") + " --shard-tokens 2000 --out " + folder_.file("data"));
    } else {
      for (int i = 0; i < 3; ++i)
        write_text(folder_.file(fmt::format("data/{}.txt", i)), fmt::format("{}", i) + std::string(4000, 'a' + i));
    }
    REQUIRE(run_program(train_args(folder_.file("run"), keys("data") + "--set train.steps=1")).exit_code == 0);
  }
  std::string file(const std::string& name) const { return folder_.file(name); }
  std::string checkpoint() const { return folder_.file("run/checkpoints/step_1"); }
  // Config arguments that name the data in the folder `data`.
  std::string keys(const std::string& data) const {
    return fmt::format("--set train.save_every=1 --set data.kind={} --set data.paths={} ", kind_,
                       folder_.file(data) + (kind_ == "shards" ? "" : "/*.txt"));
  }
  // Resumes from the first step into its own folder.
  Outcome go_on(const std::string& data, const std::string& more = "") const {
    fs::remove_all(folder_.file("again"));
    return run_program(
        train_args(folder_.file("again"), keys(data) + "--set train.steps=2 --resume " + checkpoint() + " " + more));
  }

 private:
  TemporaryFolder folder_;
  std::string kind_;
};

}  // namespace

TEST_CASE("resume: data under another path are taken, with the same weights at the end", "[train][data]") {
  for (const char* kind : {"text", "shards"}) {
    INFO(kind);
    const Resumed r(kind);
    const Outcome same = r.go_on("data");
    INFO(same.output);
    REQUIRE(same.exit_code == 0);
    const std::string weights = read_text(r.file("again") + kWeights);
    fs::rename(r.file("data"), r.file("moved"));
    const Outcome moved = r.go_on("moved");
    INFO(moved.output);
    CHECK(moved.exit_code == 0);
    CHECK(read_text(r.file("again") + kWeights) == weights);
    CHECK(has(moved.output, "data.paths"));  // listed among the keys that changed
    // A resume without a config, to which the run's own names the places that are gone.
    const std::string paths = r.file("moved") + (std::string(kind) == "text" ? "/*.txt" : "");
    const Outcome run_outcome =
        run_program("train --resume " + r.file("run") + " --set train.steps=2 --set data.paths=" + paths);
    INFO(run_outcome.output);
    CHECK(run_outcome.exit_code == 0);
    CHECK(read_text(r.file("run") + kWeights) == weights);

    Json state = state_of(r.checkpoint());
    state["data"]["train"].erase("files");  // earlier versions' checkpoints lack it
    state["data"]["val"].erase("files");
    write_text(r.checkpoint() + "/state.json", state.dump());
    const Outcome unknown = r.go_on("moved");
    INFO(unknown.output);
    CHECK(unknown.exit_code == 1);
    CHECK(has(unknown.output, "its data.paths is"));
    CHECK(has(unknown.output, "--accept-changed-data"));
    CHECK(r.go_on("moved", "--accept-changed-data").exit_code == 0);
    fs::rename(r.file("moved"), r.file("data"));
    CHECK(r.go_on("data").exit_code == 0);
  }
}

TEST_CASE("resume: data that changed are refused with what differs, and accepted if the user says so",
          "[train][data]") {
  struct Change {
    const char *kind, *name;
    std::function<void(const std::string& data)> make;
    std::vector<std::string> says;
  };
  const Change changes[] = {
      {"text", "a byte", [](const std::string& data) { change_byte(data + "/1.txt", 2000); }, {"1.txt (4001 bytes"}},
      {"text",
       "swapped",
       [](const std::string& data) {
         fs::rename(data + "/0.txt", data + "/3.txt");
         fs::rename(data + "/1.txt", data + "/0.txt");
         fs::rename(data + "/3.txt", data + "/1.txt");
       },
       {"0.txt (4001 bytes", "1.txt (4001 bytes"}},
      {"text",
       "one more",
       [](const std::string& data) { write_text(data + "/3.txt", std::string(4001, 'd')); },
       {"files of", "files, now"}},
      {"shards",
       "a token",
       [](const std::string& data) {
         change_byte(data + "/train_000001.bin", kHeaderBytes + 100);
         renew_checksums(data);
       },
       {"train_000001.bin (5024 bytes"}},
      {"shards",
       "swapped",
       [](const std::string& data) {
         fs::rename(data + "/train_000000.bin", data + "/other");
         fs::rename(data + "/train_000001.bin", data + "/train_000000.bin");
         fs::rename(data + "/other", data + "/train_000001.bin");
         renew_checksums(data);
       },
       {"train_000000.bin (5024 bytes", "train_000001.bin (5024 bytes"}},
      {"shards",
       "a token to evaluate on",
       [](const std::string& data) {
         change_byte(data + "/val_000000.bin", kHeaderBytes + 100);
         renew_checksums(data);
       },
       {"val_000000.bin ("}},
  };
  for (const Change& change : changes) {
    const Resumed r(change.kind);
    INFO(change.kind << ": " << change.name);
    change.make(r.file("data"));
    const Outcome refused = r.go_on("data");
    INFO(refused.output);
    CHECK(refused.exit_code == 1);
    for (const std::string& part : change.says) CHECK(has(refused.output, part));
    CHECK(has(refused.output, "--accept-changed-data"));
    CHECK(!fs::exists(r.file("again") + "/training.csv"));
    const Outcome accepted = r.go_on("data", "--accept-changed-data");
    INFO(accepted.output);
    CHECK(accepted.exit_code == 0);
    CHECK(has(accepted.output, "goes on with changed data"));
    for (const std::string& part : change.says) CHECK(has(accepted.output, part));
    // The next checkpoint records what the data are now.
    const std::string next = r.file("again/checkpoints/step_2");
    CHECK(run_program(train_args(r.file("later"), r.keys("data") + "--set train.steps=3 --resume " + next)).exit_code ==
          0);
  }
  // Shards that contradict their manifest, too.
  const Resumed r("shards");
  change_byte(r.file("data/train_000001.bin"), kHeaderBytes + 100);
  const Outcome refused = r.go_on("data");
  INFO(refused.output);
  CHECK(refused.exit_code == 1);
  CHECK(has(refused.output, "train_000001.bin: its CRC-32 is"));
  const Outcome accepted = r.go_on("data", "--accept-changed-data");
  INFO(accepted.output);
  CHECK(accepted.exit_code == 0);
  CHECK(has(accepted.output, "train_000001.bin: its CRC-32 is"));
  const Outcome alone = run_program(train_args("unused", "--accept-changed-data"));
  CHECK(alone.exit_code == 2);
  CHECK(has(alone.output, "--resume"));
}

TEST_CASE("resume: a damaged record of the data or of the packed rows is refused", "[train][data]") {
  const Resumed r("text");
  const Json good = state_of(r.checkpoint());
  const auto refused = [&](const Json& state, const std::string& words) {
    write_text(r.checkpoint() + "/state.json", state.dump());
    const Outcome outcome = r.go_on("data");
    INFO(outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.output, words));
  };
  for (const Json& line : {Json(3), Json("12 a.txt"), Json("00000000 -3 a.txt"), Json("0000000g 3 a.txt")}) {
    Json state = good;
    state["data"]["train"]["files"] = Json::array({line});
    refused(state, "data.train.files[0] is");
  }
  Json state = good;
  state["data"]["train"]["files"] = "none";
  refused(state, "data.train.files is \"none\"");
  state = good;
  state["packed_group"] = {{"group", -1}, {"first_row", 0}};
  refused(state, "`group` is -1");
}

TEST_CASE("resume: a checkpoint of packed rows records their group, and goes on from there in the same bits",
          "[train][data]") {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 3000; ++i) text += Json{{"text", std::string(1 + i * i % 7, 'a')}}.dump() + "\n";
  write_text(folder.file("a.jsonl"), text);
  const std::string keys =
      "--set data.kind=text --set data.val_fraction=0.01 --set data.packing=best_fit "
      "--set train.eval_every=0 --set train.seq_len=64 --set train.micro_batch_size=64 --set data.max_documents=32 "
      "--set data.paths=" +
      folder.file("a.jsonl") + " --set train.save_every=6 --set train.steps=8 ";
  REQUIRE(run_program(train_args(folder.file("whole"), keys)).exit_code == 0);
  const std::string checkpoint = folder.file("whole/checkpoints/step_6");
  const Json state = state_of(checkpoint);
  REQUIRE(state.contains("packed_group"));
  CHECK(state["packed_group"]["group"].get<int64_t>() >= 1);
  CHECK(state["packed_group"]["first_row"].get<int64_t>() * 64 <= state["cursor"].get<int64_t>());
  const std::string weights = read_text(folder.file("whole") + kWeights);
  const auto again = [&](const Json& from) {
    write_text(checkpoint + "/state.json", from.dump());
    fs::remove_all(folder.file("again"));
    const Outcome outcome = run_program(train_args(folder.file("again"), keys + "--resume " + checkpoint));
    INFO(outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(read_text(folder.file("again") + kWeights) == weights);
  };
  again(state);
  Json without = state;
  without.erase("packed_group");  // earlier versions' checkpoints lack it
  again(without);
}
