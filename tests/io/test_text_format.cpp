// What a file holds (io/data/format/text_format.h): a table of contents and names, and what is refused in which words.
#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <vector>

#include "io/data/format/text_format.h"
#include "io/data/shards.h"
#include "io/data/text_input.h"
#include "io/json_config.h"
#include "io/safetensors.h"
#include "io/tokenizer/tokenizer.h"
#include "io/weight_index.h"
#include "tests/support/corpus.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
using namespace std::literals;

namespace {

// "text", "jsonl", "shard", or why the file is refused.
std::string text_held_by(const std::string& path, TextFormat format = TextFormat::automatic) {
  try {
    const Content content = content_of(path, format);
    return content == Content::text ? "text" : content == Content::jsonl ? "jsonl" : "shard";
  } catch (const Error& e) { return e.what(); }
}

// The text in UTF-16 without a byte-order mark.
std::string utf16(std::u16string_view text, bool big_endian) {
  std::string bytes;
  for (const char16_t unit : text) {
    const char low = static_cast<char>(unit & 0xff), high = static_cast<char>(unit >> 8);
    bytes += big_endian ? high : low;
    bytes += big_endian ? low : high;
  }
  return bytes;
}

// The text, of the basic plane alone, in UTF-32 without a byte-order mark.
std::string utf32(std::u16string_view text, bool big_endian) {
  std::string bytes;
  for (const char16_t unit : text) {
    const std::string two = utf16({&unit, 1}, big_endian);
    bytes += big_endian ? "\0\0"s + two : two + "\0\0"s;
  }
  return bytes;
}

std::string tar(bool ustar) {
  std::string header(512, '\0');
  header.replace(0, 5, "a.txt");
  header.replace(100, 8, "0000644\0"sv);
  header.replace(124, 12, "00000000005\0"sv);
  if (ustar) header.replace(257, 8, "ustar\00000"sv);
  header.replace(148, 8, "        ");
  int sum = 0;
  for (const char c : header) sum += static_cast<unsigned char>(c);
  header.replace(148, 8, fmt::format("{:06o}", sum) + "\0 "s);
  return header + "hello" + std::string(507 + 1024, '\0');
}

const std::string kPointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 17209920\n";

}  // namespace

TEST_CASE("text format: content and name decide, in any compression", "[data]") {
  const TemporaryFolder folder;
  const std::string two = "{\"text\":\"a\"}\n{\"text\":\"b\"}\n", one = "{\"text\":\"a\"}\n", mark = "\xef\xbb\xbf";
  const std::string pretty = "{\n  \"text\": \"a\"\n}\n", array = "[{\"text\":\"a\"},\n{\"text\":\"b\"}]\n";
  const std::string long_line = fmt::format("{{\"text\":\"{}\"}}\n", std::string(300'000, 'x'));
  std::u16string russian;
  for (int i = 0; i < 40; ++i) russian += u"Привет, мир ";
  struct Row {
    std::string name, bytes, expected;  // expected: "text", "jsonl", or a word in the refusal
  };
  const std::vector<Row> rows = {
      {"a.jsonl", two, "jsonl"},
      {"a.JSONL", two, "jsonl"},
      {"a.ndjson", one, "jsonl"},
      {"a.jsonlines", two, "jsonl"},
      {"a.json", two, "jsonl"},
      {"a.json", long_line + long_line, "jsonl"},
      {"a.json", mark + two, "jsonl"},
      {"a.json", "\n\r\n " + two, "jsonl"},
      {"a", two, "jsonl"},
      {"a", one, "jsonl"},
      {"a", mark + two, "jsonl"},
      {"a.txt", two, "jsonl"},
      {"a.txt", "{\"text\":NaN}\n{\"text\":\"b\"}\n", "jsonl"},
      {"a", "{\"text\":\"cut\n{\"text\":\"b\"}\n", "jsonl"},  // its first line is damaged
      {"a.jsonl", "damaged\n" + two, "jsonl"},
      {"a.jsonl", "", "jsonl"},
      {"a.txt", "", "text"},
      {"a.txt", " \n", "text"},
      {"a.json", one, "a document a line, or one document?"},
      {"a.json", long_line, "a document a line, or one document?"},
      {"a.json", pretty, "JSON over several lines"},
      {"a.jsonl", pretty, "JSON over several lines"},
      {"a.txt", pretty, "JSON over several lines"},
      {"a", pretty + pretty, "JSON over several lines"},
      {"a.json", array, "JSON array"},
      {"a.jsonl", array, "JSON array"},
      {"a.txt", mark + array, "JSON array"},
      {"a", "[]", "JSON array"},
      {"a.json", "\"only a string\"", "JSON strings, numbers or words"},
      {"a.json", "7", "begins with no object"},
      {"a.txt", "\f" + two, "jsonl"},
      {"a.txt", "\xc2\xa0\n\xe2\x80\xa8\n" + two, "jsonl"},
      {"a.txt", "BZh is a band\n", "text"},
      {"a.txt", "BZh91AY&SY", "bzip2"},
      {"a.txt", "version https://git-lfs.github.com/spec/v1\nis the first line of a pointer.\n", "text"},
      {"a.txt", "gr\xfc\xdf Gott, Latin-1\n", "text"},
      {"a.txt", "one\0two\0"s, "text"},
      {"a.html", "<!DOCTYPE html><html>", "text"},
      {"a.jsonl", "<!DOCTYPE html><html>", "HTML"},
      {"a.txt", kPointer, "git-lfs pointer"},
      {"a.jsonl", kPointer, "git-lfs pointer"},
      {"a.txt", tar(true), "tar archive"},
      {"a.jsonl", tar(false), "tar archive"},
      {"a.txt", utf16(u"plain words", false), "UTF-16"},
      {"a.txt", utf16(u"plain words", true), "UTF-16"},
      {"a.jsonl", utf16(u"{\"text\":\"a\"}\n", false), "UTF-16"},
      {"a.txt", utf16(russian, false), "UTF-16"},
      {"a.txt", utf16(russian, true), "UTF-16"},
      {"a.txt", "\xff\xfe" + utf16(u"marked", false), "UTF-16"},
      {"a.txt", utf32(u"plain words", false), "UTF-32"},
      {"a.txt", utf32(u"plain words", true), "UTF-32"},
      {"a.jsonl", utf32(u"{\"text\":\"a\"}\n", false), "UTF-32"},
      {"a.txt", utf32(russian, false), "UTF-32"},
      {"a.txt", utf32(russian, true), "UTF-32"},
      {"a.dat", "\x80\0random \xff bytes"s, "NUL byte"},
      {"a.dat", std::string(5000, '\0'), "bytes are NUL"},
      {"a.txt", "a text\n" + std::string(100, '\0'), "bytes are NUL"},
      {"a.dat", "\x01\x02\x03\x04\x05\x06 controls", "control characters"},
      {"a.txt", "PK\x03\x04\x14\0\0\0"s, "zip"},
      {"a.txt", "\x04\x22\x4d\x18", "lz4"},
      {"a.jsonl", "PAR1\x15\x04", "parquet"},
      {"a.txt", "PAR1 is a level of parity.\n", "text"},
      {"a.txt", "ARROW1\0\0"s, "Arrow file"},
      {"a.txt", "ARROW1 and ARROW2\n", "text"},
      {"a.txt", "\xff\xff\xff\xff\x10\x02\0\0\x10\0"s, "Arrow stream"},
      {"a.txt", "\x80\x04\x95\x0a\0\0\0\0\0\0\0\x8c"s, "pickle"},
      {"a.txt", "\x80\x02}q\x01X"s, "pickle"},
      {"a.txt", "%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "PDF"},
      {"a.txt", "%PDF-1.4\r\n1 0 obj\r\n<< /Type", "PDF"},
      {"a.txt", "%PDF-1.7 is how a PDF begins.\n", "text"},
      {"a.txt", "%PDF-1.7\nis how a PDF begins.\n", "text"},
      {"a.txt", "GIF89a\x01\0\x01\0\x80\0\0"s, "GIF"},
      {"a.txt", "GIF8 was no version, but\n", "text"},
      {"a.txt", "GIF89a was a version.\n", "text"},
      {"a.txt", "\x93NUMPY\x01\0v\0{'descr'"s, "NumPy"},
      {"a.txt", "SQLite format 3\0\x10\0"s, "SQLite"},
      {"a.txt", "\x89PNG\r\n\x1a\n", "PNG"},
      {"a.txt", "GGUF\x03\0\0\0"s, "GGUF"},
      {"a.txt", "GGUF is a format of weights.\n", "text"},
      {"a.txt", "ORC\x0a\x03\0\0\0\x12"s, "ORC"},
      {"a.txt", "ORC\nA monster of tales.\n", "text"},
      {"a.txt", "version https://hawser.github.com/spec/ is old.\n", "text"},
      {"a.txt", "version https://hawser.github.com/spec/v1\noid sha256:4d\n", "git-lfs pointer"},
      {"a.txt", "version https://git-lfs.github.com/spec/v1\r\noid sha256:4d\r\nsize 17\r\n", "git-lfs pointer"},
      {"a.txt", "LZIP\x01\x0c", "lzip"},
      {"a.txt", "\x40\0\0\0\0\0\0\0{\"__metadata__\""s, "safetensors"},
  };
  for (const Row& row : rows) {
    for (const auto& [suffix, bytes] :
         {std::pair{""s, row.bytes}, {".gz"s, gzip(row.bytes)}, {".zst"s, zstd(row.bytes)}}) {
      const std::string path = folder.file(row.name + suffix);
      write_text(path, bytes);
      const std::string found = text_held_by(path);
      INFO(path << ": " << printable(row.bytes.substr(0, 60)) << "\n" << found);
      if (row.expected == "text" || row.expected == "jsonl") {
        CHECK(found == row.expected);
      } else {
        CHECK(has(found, row.expected));
        CHECK(has(found, path));
      }
      std::filesystem::remove(path);
    }
  }
}

TEST_CASE("text format: what was compressed twice is refused", "[data]") {
  const TemporaryFolder folder;
  for (const std::string name : {"a", "a.jsonl", "a.txt.gz"})
    for (const std::string& once : {gzip(jsonl(3, 1)), zstd(jsonl(3, 1)), gzip("x"), zstd("x")})
      for (const std::string& twice : {gzip(once), zstd(once)}) {
        write_text(folder.file(name), twice);
        for (const TextFormat format : {TextFormat::automatic, TextFormat::text, TextFormat::jsonl})
          CHECK(has(text_held_by(folder.file(name), format), "compressed twice"));
      }
}

TEST_CASE("text format: what --format says is taken, except what another program packed", "[data]") {
  const TemporaryFolder folder;
  const auto held = [&](const std::string& bytes, TextFormat format) {
    write_text(folder.file("a.json"), bytes);
    return text_held_by(folder.file("a.json"), format);
  };
  for (const std::string& bytes : {"[1]"s, "{}"s, "{\n}"s, tar(true), "\x01\x02\x03\x04\x05"s, "\x80\0\xff"s})
    CHECK(held(bytes, TextFormat::text) == "text");
  CHECK(held("{\"text\":\"a\"}", TextFormat::jsonl) == "jsonl");
  CHECK(has(held("[{},\n{}]", TextFormat::jsonl), "JSON array"));
  CHECK(held("[{}]", TextFormat::jsonl) == "jsonl");  // a bad record
  CHECK(has(held(tar(true), TextFormat::jsonl), "tar"));
  for (const TextFormat format : {TextFormat::text, TextFormat::jsonl}) {
    CHECK(has(held(kPointer, format), "git-lfs"));
    CHECK(has(held("PK\x03\x04", format), "zip"));
  }
}

TEST_CASE("text format: a look ahead does not change what is read", "[data]") {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 100'000; ++i) text += std::to_string(i) + "\n";
  for (const std::string& bytes : {text, gzip(text), zstd(text)}) {
    write_text(folder.file("a"), bytes);
    TextInput input(folder.file("a"));
    CHECK(input.look(10) == text.substr(0, 10));
    CHECK(input.look(300'000) == text.substr(0, 300'000));
    std::string read(7, '\0');
    CHECK(input.read(read) == 7);
    CHECK(read == text.substr(0, 7));
    CHECK(input.look(5) == text.substr(7, 5));
    CHECK(read_to_end(input) == text.substr(7));
    CHECK(input.look(1).empty());
  }
}

TEST_CASE("text format: weights, tokenizers and shards that are not the files themselves are named", "[io]") {
  const TemporaryFolder folder;
  for (const char* name : {"model.safetensors", "tokenizer.json", "a.bin", "train.bin", "vocab.json", "merges.txt"})
    write_text(folder.file(name), kPointer);
  check_error([&] { SafetensorsFile(folder.file("model.safetensors")); }, {"model.safetensors", "git-lfs"});
  check_error([&] { make_tokenizer(folder.file("tokenizer.json")); }, {"tokenizer.json", "git-lfs"});
  check_error([&] { make_tokenizer(folder.file("vocab.json")); }, {"git-lfs"});
  check_error([&] { parse_json(kPointer, "index.json"); }, {"index.json", "git-lfs"});
  for (const char* name : {"a.bin", "train.bin"}) check_error([&] { Shard(folder.file(name)); }, {name, "git-lfs"});
  write_text(folder.file("model.safetensors"), "\x80\x02\x8a\nl\xfc\x9c\x46\xf9 and more");
  check_error([&] { SafetensorsFile(folder.file("model.safetensors")); }, {"pickle"});
  write_text(folder.file("train.bin"), "PK\x03\x04 and more \x01");
  CHECK(!is_shard(folder.file("train.bin")));
}

TEST_CASE("text format: an adapter is refused as such by all that need a model", "[tools]") {
  const TemporaryFolder folder;
  write_text(folder.file("adapter_config.json"), "{\"peft_type\": \"LORA\"}");
  write_text(folder.file("adapter_model.safetensors"), "\x02\0\0\0\0\0\0\0{}"s);
  for (const std::string& args : {"import " + folder.path() + " --out " + folder.file("out"),
                                  "inspect " + folder.path(), "generate --prompt x --checkpoint " + folder.path(),
                                  "eval --data x --checkpoint " + folder.file("adapter_model.safetensors")}) {
    const Outcome outcome = run_program(args);
    INFO(args << "\n" << outcome.output);
    CHECK(outcome.exit_code != 0);
    CHECK(has(outcome.output, "is an adapter of PEFT"));
  }
}

TEST_CASE("text format: data, train, eval, inspect and standard input agree", "[tools]") {
  const TemporaryFolder folder;
  const std::string tiny = TRIAD_SOURCE_DIR "/configs/tiny.json --set runtime.device=cpu ";
  std::string lines;
  for (int i = 0; i < 100; ++i) lines += fmt::format("{{\"text\":\"{}{}\"}}\n", std::string(20, 'x'), i);
  REQUIRE(run_program("init " + tiny + " --out " + folder.file("weights")).exit_code == 0);
  const auto all = [&](const std::string& name, const std::string& bytes, const std::string& format = "auto") {
    const std::string path = folder.file(name), out = folder.file("out");
    write_text(path, bytes);
    const std::vector<std::string> commands = {
        TRIAD_PROGRAM " data --format " + format + " --val-fraction 0 --input " + path + " --out " + out,
        TRIAD_PROGRAM " data --format " + format + " --val-fraction 0 --input - --out " + out + " < " + path,
        TRIAD_PROGRAM " train " + tiny + " --set train.steps=1 --set data.kind=text --set 'data.paths=[\"" + path +
            "\"]' --set data.format=" + format + " --set log.out_dir=" + out,
        TRIAD_PROGRAM " eval --device cpu --batches 1 --format " + format + " --checkpoint " + folder.file("weights") +
            " --data " + path,
        TRIAD_PROGRAM " inspect --format " + format + " " + path};
    std::vector<Outcome> outcomes;
    for (const std::string& command : commands) {
      outcomes.push_back(run_command(command));
      std::filesystem::remove_all(out);
    }
    return outcomes;
  };
  // data, data of standard input, train (90 of 100 documents), eval (those in one batch), inspect
  const std::vector<std::string> documents = {"100 documents", "100 documents", "90 of 23", "18 documents",
                                              "100 documents"};
  const std::vector<Outcome> marked = all("lines.json", "\xef\xbb\xbf" + lines);
  for (size_t i = 0; i < documents.size(); ++i) {
    INFO(marked[i].output);
    CHECK(marked[i].exit_code == 0);
    CHECK(has(marked[i].output, documents[i]));
  }
  for (const auto& [bytes, kind] : {std::pair{lines, "JSONL: "}, {"A text.\n"s, "text: "}}) {
    write_text(folder.file("piped"), bytes);
    for (const std::string& from :
         {folder.file("piped"), "- < " + folder.file("piped"), "/dev/stdin < " + folder.file("piped")}) {
      const Outcome inspected = run_program("inspect " + from);
      INFO(inspected.output);
      CHECK(inspected.exit_code == 0);
      CHECK(has(inspected.output, kind));
    }
  }
  for (const Outcome& outcome : all("lines.jsonl", lines, "text")) CHECK(outcome.exit_code == 0);
  for (const auto& [bytes, word] : {std::pair{"[" + lines.substr(0, 30) + "]", "JSON array"},
                                    {tar(true), "tar archive"},
                                    {utf16(u"many plain words, again and again", false), "UTF-16"},
                                    {kPointer, "git-lfs"}})
    for (const Outcome& outcome : all("other", bytes)) {
      INFO(outcome.output);
      CHECK(outcome.exit_code == 1);
      CHECK(has(outcome.output, word));
    }
}

TEST_CASE("text format: training and evaluation refuse pipes, which they cannot read again", "[tools]") {
  const TemporaryFolder folder;
  const std::string tiny = TRIAD_SOURCE_DIR "/configs/tiny.json --set runtime.device=cpu ";
  REQUIRE(run_program("init " + tiny + " --out " + folder.file("weights")).exit_code == 0);
  const std::string train = "train " + tiny + " --set train.steps=1 --set log.out_dir=" + folder.file("out") +
                            " --set 'data.paths=[\"/dev/stdin\"]' --set data.kind=";
  for (const std::string& args :
       {train + "text", train + "shards",
        "eval --device cpu --batches 1 --checkpoint " + folder.file("weights") + " --data /dev/stdin"}) {
    const Outcome outcome = run_command("echo a text | " TRIAD_PROGRAM " " + args);
    INFO(args << "\n" << outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.output, "/dev/stdin: is a pipe or a device"));
    CHECK(!std::filesystem::exists(folder.file("out/metrics.json")));
  }
  std::string text;
  for (int i = 0; i < 200; ++i) text += "some words ";
  write_text(folder.file("text"), text);
  const Outcome from_file = run_program(train + "text < " + folder.file("text"));
  INFO(from_file.output);
  CHECK(from_file.exit_code == 0);
}
