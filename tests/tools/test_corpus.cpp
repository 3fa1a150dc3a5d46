// `triad data`: shards are the same with any compression, number of threads and interruptions; each document is in one
// split; memory is bounded; damaged input is refused.
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <random>
#include <thread>

#include "io/data/dataset.h"
#include "io/data/shard_set.h"
#include "io/file.h"
#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using triad::test::BackgroundProgram;
using triad::test::check_error;
using triad::test::read_text;
using triad::test::run_command;
using triad::test::run_program;
using triad::test::TemporaryFolder;
using triad::test::write_text;

namespace fs = std::filesystem;

namespace {

std::string gzip(const std::string& text, size_t members = 1) {
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

// Lines of JSONL with some blank lines and empty texts; a few documents are longer than a piece of the pipeline.
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

// Names and contents of the files that a call wrote.
std::map<std::string, std::string> files_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) files[entry.path().filename()] = read_text(entry.path());
  return files;
}

bool finished(const std::string& out) {
  return fs::exists(out + "/manifest.json") && !fs::exists(out + "/unfinished.json");
}

void run(const std::string& args, const std::string& environment = "") {
  const test::Outcome outcome = run_program("data " + args, environment);
  INFO(args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
}

std::string row(const std::string& folder, const std::string& prefix) {  // with byte tokens
  std::vector<int32_t> tokens;
  std::string text;
  const auto source = open_tokens({folder + "/" + prefix + "_*.bin"}, ByteTokenizer(), 256);
  tokens.resize(static_cast<size_t>(source->size()));
  source->read(0, tokens);
  for (const int32_t token : tokens) text += static_cast<char>(token);
  return text;
}

}  // namespace

TEST_CASE("corpus: packed or not, by file or standard input, on any threads: the same shards", "[data]") {
  const TemporaryFolder folder;
  const std::string text = jsonl(1500, 1);
  write_text(folder.file("plain.jsonl"), text);
  fs::create_directory(folder.file("packed"));
  write_text(folder.file("packed/a.jsonl.gz"), gzip(text));
  write_text(folder.file("packed/b.jsonl.gz"), gzip(text, 3));
  write_text(folder.file("packed/c.jsonl.zst"), zstd(text));
  write_text(folder.file("packed/d.ndjson.zst"), zstd(text.substr(0, 1'000'000)) + zstd(text.substr(1'000'000)));
  write_text(folder.file("packed/e.bin"), gzip(text));
  const std::string more = " --shard-tokens 1000000 --out ";
  run("--threads 1 --input " + folder.file("plain.jsonl") + more + folder.file("plain"));
  const auto plain = files_of(folder.file("plain"));
  CHECK(plain.size() > 4);
  CHECK(plain.contains("val_000000.bin"));
  const auto same = [&](const std::string& out) {
    const auto files = files_of(out);
    INFO(out);
    CHECK(files == plain);
  };
  for (const std::string name : {"a.jsonl.gz", "b.jsonl.gz", "c.jsonl.zst", "d.ndjson.zst"}) {
    run("--threads 3 --input " + folder.file("packed/" + name) + more + folder.file("out_" + name));
    same(folder.file("out_" + name));
  }
  run("--format jsonl --input " + folder.file("packed/e.bin") + more + folder.file("out_e"));
  same(folder.file("out_e"));
  for (const std::string name : {"plain.jsonl", "packed/a.jsonl.gz", "packed/c.jsonl.zst"}) {
    const test::Outcome piped =
        run_command("cat " + folder.file(name) + " | " TRIAD_PROGRAM " data --input - " + more + folder.file("piped"));
    INFO(piped.output);
    REQUIRE(piped.exit_code == 0);
    same(folder.file("piped"));
    fs::remove_all(folder.file("piped"));
  }
}

TEST_CASE("corpus: killed and repeated, it gives the same shards", "[data]") {
  const TemporaryFolder folder;
  fs::create_directory(folder.file("in"));
  for (uint32_t i = 0; i < 3; ++i) write_text(folder.file(fmt::format("in/{}.jsonl", i)), jsonl(1200, i));
  write_text(folder.file("in/3.txt"), jsonl(1000, 9));  // one long document
  write_text(folder.file("in/4.jsonl.gz"), gzip(jsonl(700, 10)));
  const std::string what = "--input '" + folder.file("in/*") + "' --shard-tokens 1500000 --threads 2 ";
  const auto began = std::chrono::steady_clock::now();
  run(what + "--out " + folder.file("whole"));
  // Kills the call at random times within a part of its duration; shortens the range if a call ends before the kill.
  const double whole_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
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
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // wait until it has started to write
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
    const test::Outcome last = run_program("data " + args + out);
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

TEST_CASE("corpus: a call goes on with its own shards only", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.txt"), std::string(40'000, 'x'));
  const std::string args = "--input " + folder.file("a.txt") + " --shard-tokens 1000 --out " + folder.file("out");
  // The state after a call was killed in its first save; the other file is foreign and must stay.
  fs::create_directory(folder.file("out"));
  const std::string cut = folder.file("out/unfinished.json.tmp.123"), another = folder.file("out/notes.tmp.123");
  write_text(cut, "{");
  write_text(another, "notes");
  // With a file size limit of 2 KiB the manifest of 41 shards cannot be written, but each shard can.
  const test::Outcome failed = run_program("data " + args, "ulimit -f 4;");
  INFO(failed.output);
  CHECK(failed.exit_code == 1);
  CHECK(!fs::exists(folder.file("out/manifest.json")));
  const test::Outcome other = run_program("data --seed 3 " + args);
  CHECK(other.exit_code == 1);
  CHECK(other.output.find("differs in seed: 1337, now 3") != std::string::npos);
  CHECK(!fs::exists(cut));
  run(args);
  CHECK(fs::exists(another));
  CHECK(!fs::exists(folder.file("out/unfinished.json")));
  CHECK(row(folder.file("out"), "train") + row(folder.file("out"), "val") ==
        std::string(1, '\0') + std::string(40'000, 'x'));
  const test::Outcome again = run_program("data " + args);
  CHECK(again.exit_code == 1);
  CHECK(again.output.find("already holds") != std::string::npos);
  // To resume, standard input must be the same up to the saved position.
  const std::string piped = " | " TRIAD_PROGRAM " data --save-seconds 0 --input - --out " + folder.file("piped");
  CHECK(run_command("(yes '{\"text\":\"one\"}' | head -300000; echo '{') " + piped).exit_code == 1);
  CHECK(fs::exists(folder.file("piped/unfinished.json")));
  const test::Outcome changed = run_command("(yes '{\"text\":\"two\"}' | head -300000) " + piped);
  INFO(changed.output);
  CHECK(changed.exit_code == 1);
  CHECK(changed.output.find("are not those") != std::string::npos);
  CHECK(run_command("(yes '{\"text\":\"one\"}' | head -300000) " + piped).exit_code == 0);
  CHECK(row(folder.file("piped"), "train").size() + row(folder.file("piped"), "val").size() == 4 * 300'000);
}

TEST_CASE("corpus: a call whose input is late leaves another's shards alone", "[data]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("out"), late = folder.file("late");
  REQUIRE(::mkfifo(late.c_str(), 0600) == 0);
  BackgroundProgram slow("data --input - --out " + out + " < " + late, "", folder.file("slow.txt"));
  FileHandle text(::open(late.c_str(), O_WRONLY | O_CLOEXEC));
  REQUIRE(::write(text.get(), "t", 1) == 1);
  for (int unread = 1; unread != 0 && ::ioctl(text.get(), FIONREAD, &unread) == 0;)
    std::this_thread::sleep_for(
        std::chrono::milliseconds(1));  // the call reads its input, so it has checked the folder
  write_text(folder.file("a.txt"), "of the call that began later");
  run("--input " + folder.file("a.txt") + " --val-fraction 0 --out " + out);
  const auto whole = files_of(out);
  REQUIRE(::write(text.get(), "oo late", 7) == 7);
  text.reset();
  CHECK(slow.wait() == 1);
  CHECK(read_text(folder.file("slow.txt")).find(out + " already holds") != std::string::npos);
  CHECK(files_of(out) == whole);
}

TEST_CASE("corpus: standard input that begins with a blank has to be told what it is", "[data]") {
  const TemporaryFolder folder;
  const std::string data =
      "printf '\\n{\"text\":\"one\"}\\n' | " TRIAD_PROGRAM " data --val-fraction 0 --input - --out ";
  const test::Outcome unclear = run_command(data + folder.file("unclear"));
  CHECK(unclear.exit_code == 1);
  CHECK(unclear.output.find("--format jsonl or text says") != std::string::npos);
  CHECK_FALSE(fs::exists(folder.file("unclear")));
  CHECK(run_command(data + folder.file("lines") + " --format jsonl").exit_code == 0);
  CHECK(row(folder.file("lines"), "train") == std::string(1, '\0') + "one");
}

TEST_CASE("corpus: fineweb.py that ends in the middle is not the end of its text", "[data]") {
  if (run_command("python3 -c 'import zlib'").exit_code != 0) return void(std::printf("SKIPPED: no python3\n"));
  const TemporaryFolder folder;
  fs::create_directory(folder.file("pyarrow"));
  write_text(folder.file("pyarrow/__init__.py"), "");
  write_text(folder.file("pyarrow/parquet.py"), R"(# As much of it as fineweb.py takes: 30 batches, of a bad file 20.
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
  const test::Outcome cut = data("bad"), whole = data("good");  // resumes the unfinished shards of the first call
  INFO(cut.output << whole.output);
  CHECK(cut.exit_code == 1);
  CHECK(cut.output.find("standard input: is cut") != std::string::npos);
  CHECK(whole.exit_code == 0);
  CHECK(whole.output.find("30000 documents") != std::string::npos);
  CHECK(row(folder.file("out"), "train").find("text \u00e4") == 1);
}

TEST_CASE("corpus: pipes of the shell's are read as they come", "[data]") {
  const TemporaryFolder folder;
  const test::Outcome outcome = run_command("bash -c '" TRIAD_PROGRAM
                                            " data --val-fraction 0 --input <(echo \"{\\\"text\\\":\\\"one\\\"}\") "
                                            "<(printf two | gzip) --out " +
                                            folder.file("out") + "'");
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(row(folder.file("out"), "train") == std::string("\0one\0two", 8));
}

TEST_CASE("corpus: one document of each 1/val_fraction is held out, never the first", "[data]") {
  for (const double fraction : {0.01, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9}) {
    const HeldOutStream held_out(fraction, 3), other(fraction, 4);
    CHECK(!held_out(0));
    int64_t count = 0, different = 0, longest = 0, since = 0;
    for (int64_t i = 0; i < 10'000; ++i) {
      count += held_out(i);
      different += held_out(i) != other(i);
      since = held_out(i) ? 0 : since + 1;
      longest = std::max(longest, since);
      INFO(fraction << " " << i);
      REQUIRE(std::abs(static_cast<double>(count) - fraction * static_cast<double>(i + 1)) < 2.001);
    }
    CHECK(longest <= static_cast<int64_t>(2 / fraction));
    if (fraction < 0.9) CHECK(different > 0);
  }
  CHECK(!HeldOutStream(0, 1)(5));
}

TEST_CASE("corpus: a call goes on with its own tokenizer only, and alone", "[data]") {
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
  Json elsewhere = parse_json(unfinished, "unfinished.json");
  elsewhere["position"]["file"] = 2;  // but there is only one file
  for (const std::string& damaged : {unfinished.substr(0, unfinished.size() / 2), std::string("[]"), std::string("{}"),
                                     std::string("{\"call\": 3}"), elsewhere.dump()}) {
    write_text(folder.file("out/unfinished.json"), damaged);
    const test::Outcome refused = run_program(args);
    INFO(damaged << "\n" << refused.output);
    CHECK(refused.exit_code == 1);
    CHECK(refused.output.find(folder.file("out/unfinished.json")) != std::string::npos);
  }
  write_text(folder.file("out/unfinished.json"), unfinished);
  json["model"]["merges"].erase(3);
  write_text(folder.file("tokenizer.json"), json.dump());
  const test::Outcome other = run_program(args);
  INFO(other.output);
  CHECK(other.exit_code == 1);
  CHECK(other.output.find("differs in tokenizer_files") != std::string::npos);

  // A call that waits for standard input holds the folder's lock; errors that are known before are reported at once.
  const std::string piped = TRIAD_PROGRAM " data --input - --out " + folder.file("piped");
  const auto until = [](const std::string& file) {
    return "timeout 300 sh -c 'until [ -e " + file + " ]; do sleep 0.1; done'";
  };
  const test::Outcome both =
      run_command("mkfifo " + folder.file("pipe") + "; (" + piped + " < " + folder.file("pipe") + " & exec 3> " +
                  folder.file("pipe") + "; yes '{\"text\":\"one\"}' | head -300000 >&3; " +
                  until(folder.file("piped/unfinished.json")) + "; " + piped +
                  " < /dev/null; echo \"second $?\"; echo 'a\"' | " + piped + "; echo \"third $?\"; exec 3>&-; wait)");
  INFO(both.output);
  CHECK(both.output.find("another call is writing") != std::string::npos);
  CHECK(both.output.find("second 1") != std::string::npos);
  CHECK(both.output.find("300000 documents") != std::string::npos);
  const std::string ended = folder.file("ended");
  const test::Outcome early =
      run_command("(echo '{\"text\":1}'; yes '{\"text\":\"one\"}' | head -300000; " + until(ended) +
                  " || echo it waited for the end >&2) | (" + piped + "2; touch " + ended + ")");
  INFO(early.output);
  CHECK(early.output.find("line 1") != std::string::npos);
  CHECK(early.output.find("it waited for the end") == std::string::npos);
}

TEST_CASE("corpus: documents are counted across files", "[data]") {
  const TemporaryFolder folder;
  fs::create_directory(folder.file("in"));
  for (int i = 0; i < 40; ++i) write_text(folder.file(fmt::format("in/{}.txt", 100 + i)), fmt::format("[{}]", i));
  run("--val-fraction 0.25 --input '" + folder.file("in/*.txt") + "' --out " + folder.file("out"));
  const Json manifest = Json::parse(read_text(folder.file("out/manifest.json")));
  CHECK(manifest["val"]["documents"] == 10);
  CHECK(manifest["train"]["documents"] == 30);
  const std::string train = row(folder.file("out"), "train"), val = row(folder.file("out"), "val");
  const HeldOutStream held_out(0.25, 1337);
  for (int i = 0; i < 40; ++i) {
    const std::string document = std::string(1, '\0') + fmt::format("[{}]", i);
    CHECK((val.find(document) != std::string::npos) == held_out(i));
    CHECK((train.find(document) != std::string::npos) == !held_out(i));
  }
}

TEST_CASE("corpus: few documents leave one for validation, a single one its end", "[data]") {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 3; ++i) text += fmt::format("{{\"text\":\"document {}\"}}\n", i);
  write_text(folder.file("few.jsonl"), text);
  run("--val-fraction 0.01 --shard-tokens 7 --input " + folder.file("few.jsonl") + " --out " + folder.file("few"));
  CHECK(row(folder.file("few"), "val") == std::string("\0document 2", 11));
  CHECK(row(folder.file("few"), "train") == std::string("\0document 0\0document 1", 22));
  const Json few = Json::parse(read_text(folder.file("few/manifest.json")));
  CHECK(few["train"]["documents"] == 2);
  CHECK(few["val"]["documents"] == 1);
  CHECK(few["train"]["shards"].size() == 4);
  CHECK(few["train"]["shards"][3]["tokens"] == 1);
  for (const Json& shard : few["train"]["shards"]) {
    const std::string bytes = read_text(folder.file("few/" + shard["file"].get<std::string>()));
    CHECK(shard["crc32"] == fmt::format("{:08x}", crc32(0, reinterpret_cast<const Bytef*>(bytes.data()),
                                                        static_cast<uInt>(bytes.size()))));
  }
  write_text(folder.file("one.txt"), std::string(99, 'a') + std::string(10, 'b'));
  run("--val-fraction 0.1 --shard-tokens 40 --input " + folder.file("one.txt") + " --out " + folder.file("one"));
  CHECK(row(folder.file("one"), "train") == std::string(1, '\0') + std::string(98, 'a'));
  CHECK(row(folder.file("one"), "val") == "a" + std::string(10, 'b'));
  run("--val-fraction 0 --input " + folder.file("one.txt") + " --out " + folder.file("none"));
  CHECK(!fs::exists(folder.file("none/val_000000.bin")));
}

TEST_CASE("corpus: BPE shards hold what the tokenizer says, wide ones where it is large", "[data]") {
  const TemporaryFolder folder;
  const std::string known_path = TRIAD_SOURCE_DIR "/tests/io/known_tokens.json";
  Json json = parse_json(read_file(known_path), known_path)[0]["tokenizer"];
  write_text(folder.file("tokenizer.json"), json.dump());
  std::string long_text;
  while (long_text.size() < 3'000'000)
    long_text += "It's a long text, " + std::to_string(long_text.size()) + " bytes so far.\n";
  write_text(folder.file("long.txt"), long_text);  // longer than a piece: it is cut between words
  const std::string args = "--val-fraction 0 --input " + folder.file("long.txt") + " --out ";
  run("--tokenizer " + folder.file("tokenizer.json") + " " + args + folder.file("narrow"));
  const auto tokenizer = make_tokenizer(folder.file("tokenizer.json"));
  std::vector<int32_t> expected = {tokenizer->eot()};
  tokenizer->append(long_text, expected);
  const Shard narrow(folder.file("narrow/train_000000.bin"));
  CHECK(narrow.width() == TokenWidth::u16);
  std::vector<int32_t> tokens(static_cast<size_t>(narrow.size()));
  narrow.read(0, tokens);
  CHECK(tokens == expected);
  CHECK(read_text(folder.file("narrow/tokenizer.json")) == json.dump());

  json["added_tokens"].push_back({{"id", 70'000}, {"content", "<|far|>"}, {"special", true}});
  write_text(folder.file("tokenizer.json"), json.dump());
  write_text(folder.file("long.txt"), "a<|far|>b");
  run("--tokenizer " + folder.file("tokenizer.json") + " " + args + folder.file("wide"));
  const Shard wide(folder.file("wide/train_000000.bin"));
  CHECK(wide.width() == TokenWidth::u32);
  tokens.resize(4);
  wide.read(0, tokens);
  CHECK(tokens[2] == 70'000);
  run("--special-as-text --tokenizer " + folder.file("tokenizer.json") + " " + args + folder.file("text"));
  CHECK(Shard(folder.file("text/train_000000.bin")).size() > 4);
}

TEST_CASE("corpus: damaged input is refused, with file and place", "[data]") {
  const TemporaryFolder folder;
  const std::string text = jsonl(300, 2), packed = gzip(text), packed_zstd = zstd(text);
  const auto refused = [&](const std::string& name, const std::string& bytes, const std::vector<std::string>& says) {
    write_text(folder.file(name), bytes);
    const test::Outcome outcome = run_program("data --input " + folder.file(name) + " --out " + folder.file("out"));
    INFO(name << "\n" << outcome.output);
    CHECK(outcome.exit_code == 1);
    for (const std::string& word : says) CHECK(outcome.output.find(word) != std::string::npos);
    CHECK(!fs::exists(folder.file("out/manifest.json")));
    fs::remove_all(folder.file("out"));
  };
  refused("cut.jsonl.gz", packed.substr(0, packed.size() / 2), {"cut.jsonl.gz", "is cut", "offset"});
  refused("cut.jsonl.zst", packed_zstd.substr(0, packed_zstd.size() / 2), {"cut.jsonl.zst", "is cut", "offset"});
  std::string damaged = packed;
  damaged[damaged.size() / 2] ^= 0x55;
  refused("damaged.jsonl.gz", damaged, {"damaged.jsonl.gz"});
  damaged = packed_zstd;
  damaged.replace(damaged.size() / 2, 64, std::string(64, '\xff'));
  refused("damaged.jsonl.zst", damaged, {"damaged.jsonl.zst"});
  refused("tail.jsonl.gz", packed + "more", {"tail.jsonl.gz", "gzip", fmt::format("offset {}", packed.size())});
  const std::string zeros(600'000, '\0');  // more than one read() returns
  refused("zeros.jsonl.gz", packed + zeros + packed,
          {"zeros.jsonl.gz", "600000 bytes of zeros", fmt::format("offset {}", packed.size() + zeros.size())});
  write_text(folder.file("tape.gz"), gzip("a") + gzip("b") + zeros);
  run("--val-fraction 0 --input " + folder.file("tape.gz") + " --out " + folder.file("tape"));
  CHECK(row(folder.file("tape"), "train") == std::string("\0ab", 3));
  refused("number.jsonl", "{\"text\":\"fine\"}\n{\"text\":7}\n",
          {"number.jsonl", "line 2", "offset 16", "string `text`"});
  refused("array.jsonl", "[1]\n", {"array.jsonl", "line 1"});
  refused("utf8.jsonl", "{\"text\":\"\xff\"}\n", {"utf8.jsonl", "line 1", "UTF-8"});
  refused("bz2.txt", "BZh91AY", {"bz2.txt", "bzip2"});
  refused("xz.txt", std::string("\xfd") + "7zXZ", {"xz.txt", "is xz"});
  refused("zip.txt", "PK\x03\x04 and more", {"zip.txt", "is zip"});
  refused("a.parquet", "PAR1 and more", {"a.parquet", "fineweb.py"});
  refused("binary.txt", std::string("\0\xff\1 and more", 12), {"binary.txt", "NUL", "--format text"});
  refused("a.json", "{\"text\":\"one\"}", {"a.json", "--format"});
  refused("a.json.gz", gzip("{\"text\":\"one\"}"), {"a.json.gz", "--format"});
  const test::Outcome tiny = run_program("data --val-fraction 1e-20 --input " + folder.file("a.json") + " --out x");
  CHECK(tiny.exit_code == 2);
  CHECK(tiny.output.find("--val-fraction") != std::string::npos);
  write_text(folder.file("skip.txt"), std::string("\x50\x2a\x4d\x18\x02\0\0\0ab", 10) + zstd("text"));
  run("--val-fraction 0 --input " + folder.file("skip.txt") + " --out " + folder.file("skip"));
  CHECK(row(folder.file("skip"), "train") == std::string("\0text", 5));
  refused("empty.jsonl", "\n\n{\"text\":\"\"}\n", {"there is no text"});
  refused("empty.txt", "", {"there is no text"});
}

TEST_CASE("corpus: a call that goes on removes the shards that were begun later, and no other file", "[data]") {
  const TemporaryFolder folder;
  const std::vector<std::string> later = {"train_000001.bin", "train_000002.bin.part", "train_1000000.bin"},
                                 others = {"train_000000.bin", "train_99999999999999999999.bin", "train_notes.bin",
                                           "train_000001.txt", "val_000001.bin"};
  for (const std::string& name : later) write_text(folder.file(name), "");
  for (const std::string& name : others) write_text(folder.file(name), "");
  ShardRow row(folder.path(), "train", TokenWidth::u16, 100);
  row.resume({{"documents", 1}, {"tokens", 100}, {"last_document", 0}, {"shards", {{{"file", "train_000000.bin"}}}}});
  for (const std::string& name : later) CHECK_FALSE(fs::exists(folder.file(name)));
  for (const std::string& name : others) CHECK(fs::exists(folder.file(name)));
}
