// `triad data`: shards are the same with any compression and thread count, each document is in one split, and damaged
// input is refused. Calls that are interrupted and resumed: test_corpus_resume.cpp.
#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "io/data/shard_set.h"
#include "io/data/shards.h"
#include "io/file.h"
#include "io/json_config.h"
#include "tests/support/corpus.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace fs = std::filesystem;

TEST_CASE("corpus: compression, standard input and the number of threads do not change the shards", "[data]") {
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
  run_data("--threads 1 --input " + folder.file("plain.jsonl") + more + folder.file("plain"));
  const auto plain = files_of(folder.file("plain"));
  CHECK(plain.size() > 4);
  CHECK(plain.contains("val_000000.bin"));
  const auto same = [&](const std::string& out) {
    const auto files = files_of(out);
    INFO(out);
    CHECK(files == plain);
  };
  for (const std::string name : {"a.jsonl.gz", "b.jsonl.gz", "c.jsonl.zst", "d.ndjson.zst"}) {
    run_data("--threads 3 --input " + folder.file("packed/" + name) + more + folder.file("out_" + name));
    same(folder.file("out_" + name));
  }
  run_data("--format jsonl --input " + folder.file("packed/e.bin") + more + folder.file("out_e"));
  same(folder.file("out_e"));
  for (const std::string name : {"plain.jsonl", "packed/a.jsonl.gz", "packed/c.jsonl.zst"}) {
    const Outcome piped =
        run_command("cat " + folder.file(name) + " | " TRIAD_PROGRAM " data --input - " + more + folder.file("piped"));
    INFO(piped.output);
    REQUIRE(piped.exit_code == 0);
    same(folder.file("piped"));
    fs::remove_all(folder.file("piped"));
  }
}

TEST_CASE("corpus: blank lines, line ends of other systems and byte-order marks", "[data]") {
  const TemporaryFolder folder;
  const std::string text =
      "\xef\xbb\xbf\r\n \t\r\n{\"text\":\"one\"}\r\n\u00a0\n\u2028\n\xef\xbb\xbf{\"text\":\"t\u2028w\u00a0\"}\n\v";
  for (const std::string name : {"a.jsonl", "a.json", "a"}) {
    write_text(folder.file(name), text);
    run_data("--val-fraction 0 --input " + folder.file(name) + " --out " + folder.file(name + ".out"));
    const Outcome piped = run_command(TRIAD_PROGRAM " data --val-fraction 0 --input - --out " + folder.file("piped") +
                                      " < " + folder.file(name));
    INFO(piped.output);
    CHECK(piped.exit_code == 0);
    const std::string expected = std::string("\0one\0t", 6) + "\u2028w\u00a0";
    CHECK(shard_text(folder.file(name + ".out"), "train") == expected);
    CHECK(shard_text(folder.file("piped"), "train") == expected);
    fs::remove_all(folder.file("piped"));
  }
}

TEST_CASE("corpus: --skip-bad leaves out bad records and counts them", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.jsonl"),
             "{\"txt\":\"x\"}\n{\"text\":\"one\"}\n{\"text\":\"cut\n\n{\"text\":\"two\"}\n[1]\n");
  const std::string call = "data --val-fraction 0 --input " + folder.file("a.jsonl") + " --out " + folder.file("out");
  CHECK(run_program(call).exit_code == 1);
  fs::remove_all(folder.file("out"));
  const Outcome skipped = run_program(call + " --skip-bad");
  INFO(skipped.output);
  CHECK(skipped.exit_code == 0);
  CHECK(has(skipped.output, "3 bad records skipped"));
  CHECK(has(skipped.output, "a.jsonl: line 1"));
  CHECK(shard_text(folder.file("out"), "train") == std::string("\0one\0two", 8));
  write_text(folder.file("b.jsonl"), "{\"txt\":\"x\"}\n");
  const Outcome none =
      run_program("data --skip-bad --input " + folder.file("b.jsonl") + " --out " + folder.file("none"));
  CHECK(none.exit_code == 1);
  CHECK(has(none.output, "1 bad record skipped"));
  // A bad first line is skipped, too, whatever it is.
  for (const auto& [first, bad] : std::vector<std::pair<std::string, int>>{{"[1]", 1},
                                                                           {"[{\"text\":\"x\"}]", 1},
                                                                           {"[", 1},
                                                                           {"[\"cut", 1},
                                                                           {"{\"cut", 1},
                                                                           {"{\n\"text\": \"x\"\n}", 3},
                                                                           {"null", 1},
                                                                           {"7", 1},
                                                                           {"\"one\"", 1},
                                                                           {"# a comment", 1}}) {
    write_text(folder.file("first.jsonl"), first + "\n{\"text\":\"one\"}\n{\"text\":\"two\"}\n");
    for (const std::string& from : {folder.file("first.jsonl"), "- --format jsonl < " + folder.file("first.jsonl")}) {
      const Outcome outcome =
          run_program("data --val-fraction 0 --skip-bad --out " + folder.file("first") + " --input " + from);
      INFO(from << " " << first << "\n" << outcome.output);
      CHECK(outcome.exit_code == 0);
      CHECK(has(outcome.output, fmt::format("{} bad record{} skipped", bad, bad == 1 ? "" : "s")));
      CHECK(shard_text(folder.file("first"), "train") == std::string("\0one\0two", 8));
      fs::remove_all(folder.file("first"));
    }
  }
}

TEST_CASE("corpus: empty documents at the beginning do not hold out everything", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("empty.jsonl"), "{\"text\":\"\"}\n\n");
  write_text(folder.file("one.jsonl"), "{\"text\":\"only\"}\n");
  write_text(folder.file("both.jsonl"), "{\"text\":\"\"}\n{\"text\":\"only\"}\n");
  write_text(folder.file("bad.jsonl"), "{\"txt\":\"\"}\n{\"text\":\"only\"}\n");
  for (int seed = 0; seed < 4; ++seed)
    for (const std::string& input :
         {folder.file("both.jsonl"), folder.file("empty.jsonl") + " " + folder.file("one.jsonl"),
          folder.file("bad.jsonl") + " --skip-bad"}) {
      run_data(fmt::format("--val-fraction 0.5 --seed {} --input {} --out {}", seed, input, folder.file("out")));
      INFO(input);
      CHECK(shard_text(folder.file("out"), "train") == std::string("\0on", 3));
      CHECK(shard_text(folder.file("out"), "val") == "ly");
      fs::remove_all(folder.file("out"));
    }
}

TEST_CASE("corpus: text that spells the separator is counted, in text and in shards", "[data]") {
  const TemporaryFolder folder;
  std::string lines, clean;
  for (int i = 0; i < 60; ++i) {
    lines += fmt::format("{{\"text\":\"\\u0000hello friend {}\\u0000\"}}\n", i);
    clean += fmt::format("{{\"text\":\"hello friend {}\"}}\n", i);
  }
  write_text(folder.file("a.jsonl"), lines);
  write_text(folder.file("clean.jsonl"), clean);
  const auto run = [&](const std::string& args) {
    const Outcome outcome = run_program(args);
    INFO(args << "\n" << outcome.output);
    CHECK(outcome.exit_code == 0);
    return outcome.output;
  };
  const std::string train = "train " TRIAD_SOURCE_DIR
                            "/configs/tiny.json --set runtime.device=cpu --set train.steps=1 "
                            "--set data.val_fraction=0 --set train.eval_every=0 --set log.out_dir=";
  const auto paths = [&](const std::string& kind, const std::string& name) {
    return " --set data.kind=" + kind + " --set 'data.paths=[\"" + folder.file(name) + "\"]'";
  };
  for (const std::string name : {"a", "clean"}) {
    const bool spelled = name == "a";
    const std::string data =
        run("data --val-fraction 0 --input " + folder.file(name + ".jsonl") + " --out " + folder.file(name));
    CHECK(has(data, "spells the separator (token 0) 120 times") == spelled);
    CHECK(has(data, "180 documents of 60") == spelled);
    const std::string text = run(train + folder.file(name + "_text") + paths("text", name + ".jsonl"));
    CHECK(has(text, "spells the separator (token 0) 120 times") == spelled);
    const std::string shards = run(train + folder.file(name + "_shards") + paths("shards", name));
    CHECK(has(shards, "occurs 120 times more often than there are documents (60)") == spelled);
    CHECK(has(text + data + shards, "warning") == spelled);
  }
}

TEST_CASE("corpus: pipes from the shell's process substitution can be read", "[data]") {
  const TemporaryFolder folder;
  const Outcome outcome = run_command("bash -c '" TRIAD_PROGRAM
                                      " data --val-fraction 0 --input <(echo \"{\\\"text\\\":\\\"one\\\"}\") "
                                      "<(printf two | gzip) --out " +
                                      folder.file("out") + "'");
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(shard_text(folder.file("out"), "train") == std::string("\0one\0two", 8));
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

TEST_CASE("corpus: documents are counted across files", "[data]") {
  const TemporaryFolder folder;
  fs::create_directory(folder.file("in"));
  for (int i = 0; i < 40; ++i) write_text(folder.file(fmt::format("in/{}.txt", 100 + i)), fmt::format("<{}>", i));
  run_data("--val-fraction 0.25 --input '" + folder.file("in/*.txt") + "' --out " + folder.file("out"));
  const Json manifest = Json::parse(read_text(folder.file("out/manifest.json")));
  CHECK(manifest["val"]["documents"] == 10);
  CHECK(manifest["train"]["documents"] == 30);
  const std::string train = shard_text(folder.file("out"), "train"), val = shard_text(folder.file("out"), "val");
  const HeldOutStream held_out(0.25, 1337);
  for (int i = 0; i < 40; ++i) {
    const std::string document = std::string(1, '\0') + fmt::format("<{}>", i);
    CHECK((val.find(document) != std::string::npos) == held_out(i));
    CHECK((train.find(document) != std::string::npos) == !held_out(i));
  }
}

TEST_CASE("corpus: of few documents one is held out for validation, of a single one its end", "[data]") {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 3; ++i) text += fmt::format("{{\"text\":\"document {}\"}}\n", i);
  write_text(folder.file("few.jsonl"), text);
  run_data("--val-fraction 0.01 --shard-tokens 7 --input " + folder.file("few.jsonl") + " --out " + folder.file("few"));
  CHECK(shard_text(folder.file("few"), "val") == std::string("\0document 2", 11));
  CHECK(shard_text(folder.file("few"), "train") == std::string("\0document 0\0document 1", 22));
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
  run_data("--val-fraction 0.1 --shard-tokens 40 --input " + folder.file("one.txt") + " --out " + folder.file("one"));
  CHECK(shard_text(folder.file("one"), "train") == std::string(1, '\0') + std::string(98, 'a'));
  CHECK(shard_text(folder.file("one"), "val") == "a" + std::string(10, 'b'));
  run_data("--val-fraction 0 --input " + folder.file("one.txt") + " --out " + folder.file("none"));
  CHECK(!fs::exists(folder.file("none/val_000000.bin")));
}

TEST_CASE("corpus: BPE shards contain the tokenizer's tokens, in 4 bytes if its vocabulary is large", "[data]") {
  const TemporaryFolder folder;
  const std::string known_path = TRIAD_SOURCE_DIR "/tests/io/known_tokens.json";
  Json json = parse_json(read_file(known_path), known_path)[0]["tokenizer"];
  write_text(folder.file("tokenizer.json"), json.dump());
  std::string long_text;
  while (long_text.size() < 3'000'000)
    long_text += "It's a long text, " + std::to_string(long_text.size()) + " bytes so far.\n";
  write_text(folder.file("long.txt"), long_text);  // longer than a pipeline piece, so it is cut between words
  const std::string args = "--val-fraction 0 --input " + folder.file("long.txt") + " --out ";
  run_data("--tokenizer " + folder.file("tokenizer.json") + " " + args + folder.file("narrow"));
  const auto tokenizer = make_tokenizer(folder.file("tokenizer.json"));
  std::vector<int32_t> expected = {tokenizer->eot()};
  tokenizer->append(long_text, expected);
  const Shard narrow(folder.file("narrow/train_000000.bin"));
  CHECK(narrow.width() == TokenWidth::u16);
  std::vector<int32_t> tokens(static_cast<size_t>(narrow.size()));
  narrow.read(0, tokens);
  CHECK(tokens == expected);
  CHECK(read_text(folder.file("narrow/tokenizer.json")) == json.dump());
  // Another tokenizer in the folder is not replaced by the copy.
  fs::create_directory(folder.file("theirs"));
  write_text(folder.file("theirs/tokenizer.json"), "{}");
  const Outcome refused =
      run_program("data --tokenizer " + folder.file("tokenizer.json") + " " + args + folder.file("theirs"));
  CHECK(refused.exit_code == 1);
  CHECK(refused.output.find("theirs/tokenizer.json is another file than this tokenizer's") != std::string::npos);
  CHECK(read_text(folder.file("theirs/tokenizer.json")) == "{}");
  CHECK(files_of(folder.file("theirs")).size() == 1);

  json["added_tokens"].push_back({{"id", 70'000}, {"content", "<|far|>"}, {"special", true}});
  write_text(folder.file("tokenizer.json"), json.dump());
  write_text(folder.file("long.txt"), "a<|far|>b");
  run_data("--tokenizer " + folder.file("tokenizer.json") + " " + args + folder.file("wide"));
  const Shard wide(folder.file("wide/train_000000.bin"));
  CHECK(wide.width() == TokenWidth::u32);
  tokens.resize(4);
  wide.read(0, tokens);
  CHECK(tokens[2] == 70'000);
  run_data("--special-as-text --tokenizer " + folder.file("tokenizer.json") + " " + args + folder.file("text"));
  CHECK(Shard(folder.file("text/train_000000.bin")).size() > 4);
}

TEST_CASE("corpus: damaged input is refused, with file and position", "[data]") {
  const TemporaryFolder folder;
  const std::string text = jsonl(300, 2), packed = gzip(text), packed_zstd = zstd(text);
  const auto refused = [&](const std::string& name, const std::string& bytes, const std::vector<std::string>& words) {
    write_text(folder.file(name), bytes);
    const Outcome outcome = run_program("data --input " + folder.file(name) + " --out " + folder.file("out"));
    INFO(name << "\n" << outcome.output);
    CHECK(outcome.exit_code == 1);
    for (const std::string& word : words) CHECK(outcome.output.find(word) != std::string::npos);
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
  const std::string zeros(600'000, '\0');  // longer than one read() buffer
  refused("zeros.jsonl.gz", packed + zeros + packed,
          {"zeros.jsonl.gz", "600000 bytes of zeros", fmt::format("offset {}", packed.size() + zeros.size())});
  write_text(folder.file("tape.gz"), gzip("a") + gzip("b") + zeros);
  run_data("--val-fraction 0 --input " + folder.file("tape.gz") + " --out " + folder.file("tape"));
  CHECK(shard_text(folder.file("tape"), "train") == std::string("\0ab", 3));
  refused("number.jsonl", "{\"text\":\"fine\"}\n{\"text\":7}\n",
          {"number.jsonl", "line 2", "offset 16", "string `text`", "--format text or data.format text"});
  refused("words.jsonl", "no JSON\n", {"words.jsonl", "line 1", "--format text or data.format text"});
  refused("array.jsonl", "[1]\n", {"array.jsonl", "JSON array"});
  refused("utf8.jsonl", "{\"text\":\"\xff\"}\n", {"utf8.jsonl", "line 1", "UTF-8"});
  refused("bz2.txt", "BZh91AY", {"bz2.txt", "bzip2"});
  refused("xz.txt", std::string("\xfd") + "7zXZ", {"xz.txt", "is xz"});
  refused("zip.txt", "PK\x03\x04 and more", {"zip.txt", "is zip"});
  refused("a.parquet", "PAR1\x15\x04", {"a.parquet", "fineweb.py"});
  refused("binary.txt", std::string("\0\xff\1 and more", 12), {"binary.txt", "NUL", "--format text"});
  refused("a.json", "{\"text\":\"one\"}", {"a.json", "--format"});
  refused("a.json.gz", gzip("{\"text\":\"one\"}"), {"a.json.gz", "--format"});
  const Outcome tiny = run_program("data --val-fraction 1e-20 --input " + folder.file("a.json") + " --out x");
  CHECK(tiny.exit_code == 2);
  CHECK(tiny.output.find("--val-fraction") != std::string::npos);
  write_text(folder.file("skip.txt"), std::string("\x50\x2a\x4d\x18\x02\0\0\0ab", 10) + zstd("text"));
  run_data("--val-fraction 0 --input " + folder.file("skip.txt") + " --out " + folder.file("skip"));
  CHECK(shard_text(folder.file("skip"), "train") == std::string("\0text", 5));
  refused("empty.jsonl", "\n\n{\"text\":\"\"}\n", {"there is no text"});
  refused("empty.txt", "", {"there is no text"});
}
