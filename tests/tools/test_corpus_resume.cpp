// `triad data`, interrupted and called again: the call resumes its own unfinished shards, and changes no others.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "io/data/shard_set.h"
#include "io/file.h"
#include "io/json_config.h"
#include "tests/support/corpus.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace fs = std::filesystem;

namespace {

bool finished(const std::string& out) {
  return fs::exists(out + "/manifest.json") && !fs::exists(out + "/unfinished.json");
}

}  // namespace

TEST_CASE("corpus: a call that is killed and repeated writes the same shards", "[data]") {
  const TemporaryFolder folder;
  fs::create_directory(folder.file("in"));
  for (uint32_t i = 0; i < 3; ++i) write_text(folder.file(fmt::format("in/{}.jsonl", i)), jsonl(1200, i));
  write_text(folder.file("in/3.txt"), jsonl(1000, 9));  // one long document
  write_text(folder.file("in/4.jsonl.gz"), gzip(jsonl(700, 10)));
  const std::string what = "--input '" + folder.file("in/*") + "' --shard-tokens 1500000 --threads 2 ";
  const auto start = std::chrono::steady_clock::now();
  run_data(what + "--out " + folder.file("whole"));
  // Kills the call at random times within the first `seconds`, and shortens this range if a call ends before the kill.
  const double whole_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  double seconds = 0.4 * whole_s;
  const std::string args = what + fmt::format("--save-seconds {} --out ", std::min(0.1, whole_s / 20));
  const auto whole = files_of(folder.file("whole"));
  std::mt19937 random(4);
  std::uniform_real_distribution<double> uniform(0, 1);
  int ended_first = 0, resumes = 0;
  for (int trial = 0; trial < 4; ++trial) {
    const std::string out = folder.file("killed");
    for (int kills = 0; kills < 3;) {
      BackgroundProgram program("data " + args + out);
      for (int wait = 0; trial % 2 == 1 && wait < 10000 && !fs::exists(out + "/unfinished.json") && !finished(out);
           ++wait)
        std::this_thread::sleep_for(
            std::chrono::milliseconds(1));  // odd trials start to wait once shards are being written
      std::this_thread::sleep_for(std::chrono::duration<double>(uniform(random) * seconds));
      program.send(SIGKILL);
      program.wait();
      if (!finished(out)) {
        ++kills;
        continue;
      }
      REQUIRE(++ended_first < 100);
      seconds *= 0.8;
      fs::remove_all(out);
      kills = 0;
    }
    const Outcome last = run_program("data " + args + out);
    INFO(last.output);
    CHECK(last.exit_code == 0);
    resumes += last.output.find("resumes after") != std::string::npos;
    const auto files = files_of(out);
    for (const auto& [name, bytes] : whole) {
      INFO(name);
      const bool same = files.contains(name) && files.at(name) == bytes;
      CHECK(same);
    }
    for (const auto& [name, bytes] : files) {
      INFO(name);
      CHECK(whole.contains(name));
    }
    fs::remove_all(out);
  }
  CHECK(resumes >= 1);
}

TEST_CASE("corpus: a call resumes its own shards only", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.txt"), std::string(40'000, 'x'));
  const std::string args = "--input " + folder.file("a.txt") + " --shard-tokens 1000 --out " + folder.file("out");
  // The files that a call leaves if it is killed during its first save; the other file is a user's and must stay.
  fs::create_directory(folder.file("out"));
  const std::string tmp = ".tmp.471101234567890123456789";
  const std::string cut = folder.file("out/unfinished.json" + tmp), another = folder.file("out/notes" + tmp);
  write_text(cut, "{");
  write_text(another, "notes");
  // With a 2 KiB file size limit the manifest for 41 shards can't be written, but each shard can.
  const Outcome failed = run_program("data " + args, "ulimit -f 4;");
  INFO(failed.output);
  CHECK(failed.exit_code == 1);
  CHECK(!fs::exists(folder.file("out/manifest.json")));
  const Outcome other = run_program("data --seed 3 " + args);
  CHECK(other.exit_code == 1);
  CHECK(other.output.find("differs in seed: 1337, now 3") != std::string::npos);
  CHECK(!fs::exists(cut));
  run_data(args);
  CHECK(fs::exists(another));
  CHECK(!fs::exists(folder.file("out/unfinished.json")));
  CHECK(shard_text(folder.file("out"), "train") + shard_text(folder.file("out"), "val") ==
        std::string(1, '\0') + std::string(40'000, 'x'));
  const Outcome again = run_program("data " + args);
  CHECK(again.exit_code == 1);
  CHECK(again.output.find("already holds") != std::string::npos);
  // A resume is refused unless standard input is the same up to the saved position.
  const std::string piped = " | " TRIAD_PROGRAM " data --save-seconds 0 --input - --out " + folder.file("piped");
  CHECK(run_command("(yes '{\"text\":\"one\"}' | head -300000; echo '{') " + piped).exit_code == 1);
  CHECK(fs::exists(folder.file("piped/unfinished.json")));
  const Outcome changed = run_command("(yes '{\"text\":\"two\"}' | head -300000) " + piped);
  INFO(changed.output);
  CHECK(changed.exit_code == 1);
  CHECK(changed.output.find("are not those") != std::string::npos);
  CHECK(run_command("(yes '{\"text\":\"one\"}' | head -300000) " + piped).exit_code == 0);
  CHECK(shard_text(folder.file("piped"), "train").size() + shard_text(folder.file("piped"), "val").size() ==
        4 * 300'000);
}

TEST_CASE("corpus: a call whose input arrives late does not change the shards of another call", "[data]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("out"), late = folder.file("late");
  REQUIRE(::mkfifo(late.c_str(), 0600) == 0);
  BackgroundProgram slow("data --input - --out " + out + " < " + late, "", folder.file("slow.txt"));
  FileHandle text(::open(late.c_str(), O_WRONLY | O_CLOEXEC));
  REQUIRE(::write(text.get(), "t", 1) == 1);
  for (int unread = 1; unread != 0 && ::ioctl(text.get(), FIONREAD, &unread) == 0;)
    std::this_thread::sleep_for(
        std::chrono::milliseconds(1));  // once the call has read its input, it has checked the folder
  write_text(folder.file("a.txt"), "of the call that started later");
  run_data("--input " + folder.file("a.txt") + " --val-fraction 0 --out " + out);
  const auto whole = files_of(out);
  REQUIRE(::write(text.get(), "oo late", 7) == 7);
  text.reset();
  CHECK(slow.wait() == 1);
  CHECK(read_text(folder.file("slow.txt")).find(out + " already holds") != std::string::npos);
  CHECK(files_of(out) == whole);
}

TEST_CASE("corpus: if fineweb.py fails in the middle of its output, the shards stay unfinished", "[data]") {
  if (run_command("python3 -c 'import zlib'").exit_code != 0) return void(skip("no python3"));
  const TemporaryFolder folder;
  fs::create_directory(folder.file("pyarrow"));
  write_text(folder.file("pyarrow/__init__.py"), "");
  write_text(folder.file("pyarrow/parquet.py"),
             R"(# The part of pyarrow that fineweb.py uses: a file has 30 batches; the file "bad" fails after 20.
class Batch:
    def column(self, _): return self
    def to_pylist(self): return ["text \u00e4"] * 1000
class ParquetFile:
    def __init__(self, name):
        self.name = name
        self.schema_arrow = type("Schema", (), {"names": ["text"]})
    def iter_batches(self, **_):
        for n in range(30):
            if self.name == "bad" and n == 20: raise OSError("the disk is gone")
            yield Batch()
)");
  const auto data = [&](const std::string& name) {
    return run_command("PYTHONPATH=" + folder.path() + " python3 " TRIAD_SOURCE_DIR "/tools/fineweb.py " + name +
                       " | " TRIAD_PROGRAM " data --save-seconds 0 --input - --out " + folder.file("out"));
  };
  const Outcome cut = data("bad"), whole = data("good");  // the second call resumes the first one's shards
  INFO(cut.output << whole.output);
  CHECK(cut.exit_code == 1);
  CHECK(cut.output.find("standard input: is cut") != std::string::npos);
  CHECK(whole.exit_code == 0);
  CHECK(whole.output.find("30000 documents") != std::string::npos);
  CHECK(shard_text(folder.file("out"), "train").find("text \u00e4") == 1);
}

TEST_CASE("corpus: a call resumes with the same tokenizer only, and one call at a time", "[data][waits]") {
  const TemporaryFolder folder;
  const std::string known_path = TRIAD_SOURCE_DIR "/tests/io/known_tokens.json";
  Json json = parse_json(read_file(known_path), known_path)[0]["tokenizer"];
  write_text(folder.file("tokenizer.json"), json.dump());
  write_text(folder.file("a.jsonl"), jsonl(300, 3) + "{\n");
  const std::string args = "data --save-seconds 0 --tokenizer " + folder.file("tokenizer.json") + " --input " +
                           folder.file("a.jsonl") + " --out " + folder.file("out");
  CHECK(run_program(args).exit_code == 1);
  REQUIRE(fs::exists(folder.file("out/unfinished.json")));
  const std::string unfinished = read_text(folder.file("out/unfinished.json"));
  Json beyond_input = parse_json(unfinished, "unfinished.json");
  beyond_input["position"]["file"] = 2;  // the call has only one input file
  for (const std::string& damaged : {unfinished.substr(0, unfinished.size() / 2), std::string("[]"), std::string("{}"),
                                     std::string("{\"call\": 3}"), beyond_input.dump()}) {
    write_text(folder.file("out/unfinished.json"), damaged);
    const Outcome refused = run_program(args);
    INFO(damaged << "\n" << refused.output);
    CHECK(refused.exit_code == 1);
    CHECK(refused.output.find(folder.file("out/unfinished.json")) != std::string::npos);
  }
  write_text(folder.file("out/unfinished.json"), unfinished);
  json["model"]["merges"].erase(3);
  write_text(folder.file("tokenizer.json"), json.dump());
  const Outcome other = run_program(args);
  INFO(other.output);
  CHECK(other.exit_code == 1);
  CHECK(other.output.find("differs in tokenizer_files") != std::string::npos);

  // A call that waits for standard input holds the folder's lock, so a second call fails. An error in an early line is
  // reported before the remaining input is read.
  const std::string piped = TRIAD_PROGRAM " data --input - --out " + folder.file("piped");
  const auto until = [](const std::string& file) {
    return "timeout 300 sh -c 'until [ -e " + file + " ]; do sleep 0.1; done'";
  };
  const Outcome both =
      run_command("mkfifo " + folder.file("pipe") + "; (" + piped + " < " + folder.file("pipe") + " & exec 3> " +
                  folder.file("pipe") + "; yes '{\"text\":\"one\"}' | head -300000 >&3; " +
                  until(folder.file("piped/unfinished.json")) + "; " + piped +
                  " < /dev/null; echo \"second $?\"; echo 'a\"' | " + piped + "; echo \"third $?\"; exec 3>&-; wait)");
  INFO(both.output);
  CHECK(both.output.find("another call is writing") != std::string::npos);
  CHECK(both.output.find("second 1") != std::string::npos);
  CHECK(both.output.find("300000 documents") != std::string::npos);
  const std::string ended = folder.file("ended");
  const Outcome early = run_command("(echo '{\"text\":1}'; yes '{\"text\":\"one\"}' | head -300000; " + until(ended) +
                                    " || echo it read all of its input >&2) | (" + piped + "2; touch " + ended + ")");
  INFO(early.output);
  CHECK(early.output.find("line 1") != std::string::npos);
  CHECK(early.output.find("it read all of its input") == std::string::npos);
}

TEST_CASE("corpus: a resume removes later shards of the interrupted call, and no other file", "[data]") {
  const TemporaryFolder folder;
  const std::vector<std::string> later = {"train_000001.bin", "train_000002.bin.part", "train_000002.bin.mask",
                                          "train_1000000.bin"},
                                 others = {"train_000000.bin", "train_99999999999999999999.bin", "train_notes.bin",
                                           "train_000001.txt", "val_000001.bin"};
  for (const std::string& name : later) write_text(folder.file(name), "");
  for (const std::string& name : others) write_text(folder.file(name), "");
  ShardRow row(folder.path(), "train", ShardLayout{}, 100);
  const Json shard = {{"file", "train_000000.bin"}, {"tokens", 100}, {"bytes", 0}, {"crc32", "00000000"}};
  row.resume({{"documents", 1}, {"tokens", 100}, {"last_document", 0}, {"shards", Json::array({shard})}});
  for (const std::string& name : later) CHECK_FALSE(fs::exists(folder.file(name)));
  for (const std::string& name : others) CHECK(fs::exists(folder.file(name)));
}

TEST_CASE("corpus: a call does not resume with shards that changed, or that its state names elsewhere", "[data]") {
  struct Fault {
    const char* name;
    std::function<void(const std::string& out)> make;
    std::vector<std::string> says;
  };
  const auto change = [](const std::string& path, size_t at) {
    std::string bytes = read_text(path);
    bytes.at(at) ^= 1;
    write_text(path, bytes);
  };
  const auto rename_shard = [](const std::string& out, const std::string& name) {
    Json state = parse_json(read_text(out + "/unfinished.json"), "unfinished");
    state["train"]["shards"][1]["file"] = name;
    write_text(out + "/unfinished.json", state.dump());
  };
  const Fault faults[] = {
      {"edited",
       [&](const std::string& out) { change(out + "/train_000001.bin", 1100); },
       {"train_000001.bin: has changed since it was written", "3024 bytes"}},
      {"truncated",
       [](const std::string& out) { fs::resize_file(out + "/train_000001.bin", 2000); },
       {"train_000001.bin: has changed since it was written", "now 2000 bytes"}},
      {"removed", [](const std::string& out) { fs::remove(out + "/train_000001.bin"); }, {"train_000001.bin"}},
      {"swapped",
       [](const std::string& out) {
         fs::rename(out + "/train_000000.bin", out + "/x");
         fs::rename(out + "/train_000001.bin", out + "/train_000000.bin");
         fs::rename(out + "/x", out + "/train_000001.bin");
       },
       {"train_000000.bin: has changed since it was written"}},
      {"an edited part",
       [&](const std::string& out) { change(out + "/train_000002.bin.part", 1030); },
       {"train_000002.bin.part: has changed since it was written", "500 tokens"}},
      {"a name above",
       [&](const std::string& out) { rename_shard(out, "../train_000001.bin"); },
       {"../train_000001.bin"}},
      {"an absolute name", [&](const std::string& out) { rename_shard(out, "/etc/passwd"); }, {"/etc/passwd"}},
      {"another name", [&](const std::string& out) { rename_shard(out, "train_000000.bin"); }, {"as shard 1"}},
  };
  const auto write = [](ShardRow& row, int from, int to) {
    for (int32_t i = from; i < to; ++i) row.append(std::vector<int32_t>(100, i));
  };
  for (const Fault& fault : faults) {
    INFO(fault.name);
    const TemporaryFolder folder;
    const std::string out = folder.path();
    {
      ShardRow row(out, "train", ShardLayout{}, 1000);
      write(row, 0, 25);
      write_text(out + "/unfinished.json", Json{{"train", row.pause()}}.dump());
    }
    const auto resume = [&] {
      ShardRow row(out, "train", ShardLayout{}, 1000);
      row.resume(parse_json(read_text(out + "/unfinished.json"), "unfinished")["train"]);
      write(row, 25, 30);
      row.finish();
      return row.report();
    };
    const std::string part = read_text(out + "/train_000002.bin.part");
    CHECK(resume()["shards"].size() == 3);
    fs::remove(out + "/train_000002.bin");
    write_text(out + "/train_000002.bin.part", part);
    fault.make(out);
    check_error(resume, fault.says);
    CHECK(fs::exists(out + "/train_000000.bin"));
  }
}
