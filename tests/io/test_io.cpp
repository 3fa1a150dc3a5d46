// io/: files, shards, tables and JSON: round trips, known bytes, and every kind of malformed input. For weight files
// see test_safetensors.cpp.
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "engine/check.h"
#include "io/csv.h"
#include "io/data/shards.h"
#include "io/file.h"
#include "io/json_builder.h"
#include "io/json_config.h"
#include "io/jsonl.h"
#include "io/safetensors.h"
#include "io/tokenizer/tokenizer.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using triad::test::check_error;
using triad::test::count_files;
using triad::test::read_text;
using triad::test::run_program;
using triad::test::TemporaryFolder;
using triad::test::write_text;
namespace fs = std::filesystem;

namespace {

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

}  // namespace

TEST_CASE("io: an atomic file appears whole or not at all", "[io]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("f.txt");
  write_file_atomically(path, "old");
  {
    AtomicFile file(path);
    file.write(std::string_view("half of the new"));
    CHECK(read_text(path) == "old");
    CHECK(count_files(folder.path()) == 2);
  }
  CHECK(read_text(path) == "old");
  CHECK(count_files(folder.path()) == 1);
  AtomicFile file(path);
  file.write(std::string_view("0123456789"));
  file.write_at(2, std::as_bytes(std::span("ab", 2)));
  file.commit();
  CHECK(read_file(path) == "01ab456789");
  CHECK(count_files(folder.path()) == 1);
}

TEST_CASE("io: temporary names are unique", "[io]") {
  std::set<std::string> names;
  for (int i = 0; i < 100; ++i) {
    const std::string name = temporary_name("a.tmp.b");
    std::string target;
    CHECK(is_temporary(name, &target));
    CHECK(target == "a.tmp.b");
    CHECK(names.insert(name).second);
  }
}

TEST_CASE("io: a failed write names path and reason, and leaves no file", "[io]") {
  const TemporaryFolder folder;
  check_error([&] { write_file_atomically(folder.file("none/f"), "x"); }, {"none/f", "No such file"});
  check_error([&] { AppendFile("/dev/full").append("line\n"); }, {"/dev/full", "5 bytes", "No space left"});
  check_error([&] { make_folders("/proc/version/x"); }, {"/proc/version/x"});
  write_text(folder.file("file"), "");
  check_error([&] { make_folders(folder.file("file")); }, {"file", "Not a directory"});
  // A limit on file sizes simulates a full disk.
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 1 << 16;
  setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    write_file_atomically(folder.file("big"), std::string(1 << 20, 'x'));
  } catch (const Error& e) { message = e.what(); }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  INFO(message);
  CHECK(message.find("big: cannot write 1048576 bytes at offset 65536 (65536 of them written)") != std::string::npos);
  CHECK(count_files(folder.path()) == 1);
}

TEST_CASE("io: input files and globs", "[io]") {
  const TemporaryFolder folder;
  for (const char* name : {"b.txt", "a.txt", "c[1].txt", "d.bin"}) write_text(folder.file(name), name);
  fs::create_directory(folder.file("sub.txt"));
  fs::create_symlink("a.txt", folder.file("z.txt"));
  using Files = std::vector<std::string>;
  const Files text = {folder.file("a.txt"), folder.file("b.txt"), folder.file("c[1].txt")};
  CHECK(expand_globs(Files{folder.file("*.txt")}) == text);  // no folders; a.txt once, although a link matches too
  CHECK(expand_globs(Files{folder.file("c[1].txt"), folder.file("[ab].txt"), folder.file("a*")}) ==
        Files{text[2], text[0], text[1]});
  check_error([&] { expand_globs(Files{folder.file("a*"), folder.file("*.none")}); }, {"*.none"});
  check_error([&] { expand_globs(Files{folder.path()}); }, {"this is a folder", "/* takes its files"});
  write_text(folder.file("manifest.json"), "");
  check_error([&] { expand_globs(Files{folder.path()}); }, {"/*.bin takes its token shards"});
  CHECK(InputFile(folder.file("d.bin")).text(0, 100) == "d.bin");
  write_text(folder.file("empty"), "");
  CHECK(InputFile(folder.file("empty")).size() == 0);
  check_error([&] { InputFile(folder.file("none")); }, {"none", "No such file"});
  check_error([&] { InputFile(folder.path()); }, {folder.path(), "folder"});
}

TEST_CASE("io: globs leave out nothing in silence", "[io]") {
  const TemporaryFolder folder;
  const fs::path root = folder.path();
  for (const char* name : {"d1/e/f", "d2", "d3/.hidden"}) fs::create_directories(root / name);
  for (const char* name : {"x.txt", "d1/x.txt", "d1/e/f/x.txt", "d1/e/y.bin", "d2/x.txt", "d3/.hidden/x.txt"})
    write_text(folder.file(name), name);
  using Files = std::vector<std::string>;
  const auto match = [&](const std::string& pattern) {
    Files names;
    for (const std::string& file : expand_globs(Files{folder.file(pattern)}))
      names.push_back(fs::relative(file, root).string());
    return names;
  };
  CHECK(match("d*/x.txt") == Files{"d1/x.txt", "d2/x.txt"});
  CHECK(match("d[!2]/*.txt") == Files{"d1/x.txt"});
  CHECK(match("*/e/*/x.txt") == Files{"d1/e/f/x.txt"});
  CHECK(match("**/x.txt") == Files{"d1/e/f/x.txt", "d1/x.txt", "d2/x.txt", "x.txt"});
  CHECK(match("d1/**") == Files{"d1/e/f/x.txt", "d1/e/y.bin", "d1/x.txt"});
  CHECK(match("d1/**/e/**/*.txt") == Files{"d1/e/f/x.txt"});
  CHECK(match("d3/.h*/x.txt") == Files{"d3/.hidden/x.txt"});
  check_error([&] { match("**.txt"); }, {"**.txt", "stands alone"});
  check_error([&] { match("x.txt/*"); }, {"no file matches"});
  fs::create_directory_symlink(root / "d1", root / "d1/e/back");  // a link loop
  fs::create_directory_symlink(root / "d1", root / "link");
  CHECK(match("**/x.txt").size() == 4);
  CHECK(match("link/**/x.txt").size() == 2);
  for (const char* name : {"d2/x.txt.bak", "d9"}) {
    fs::create_symlink("nowhere", root / name);
    const std::string pattern = std::string(name) == "d9" ? "d*/x.txt" : "d2/x*";
    check_error([&] { match(pattern); }, {name, "No such file"});
    check_error([&] { match("**/x*"); }, {name, "No such file"});
    fs::remove(root / name);
  }
  // A folder that may not be read; root may read all, so the program runs as another user there.
  fs::permissions(root / "d2", fs::perms::none);
  fs::permissions(root, fs::perms::owner_all | fs::perms::group_all | fs::perms::others_all);
  const bool is_root = ::geteuid() == 0;
  for (const char* pattern : {"d*/x.txt", "d*/*.txt", "**/x.txt", "d2/x.txt"}) {
    const std::string call = TRIAD_PROGRAM " data --input '" + folder.file(pattern) + "' --out " + folder.file("out");
    const test::Outcome outcome =
        test::run_command((is_root ? "setpriv --reuid=65534 --regid=65534 --clear-groups " : "") + call);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(test::has(outcome.output, "Permission denied"));
    CHECK(!fs::exists(root / "out"));
  }
  fs::permissions(root / "d2", fs::perms::owner_all);
}

TEST_CASE("io: byte tokenizer", "[io]") {
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer("byte");
  const std::vector<int32_t> tokens = tokenizer->encode(all);
  REQUIRE(tokens.size() == 256);
  for (int i = 0; i < 256; ++i) CHECK(tokens[static_cast<size_t>(i)] == i);
  CHECK(tokenizer->decode(tokens) == all);
  check_error([&] { tokenizer->decode(std::vector<int32_t>{1, 256}); }, {"256", "position 1"});
  check_error([] { make_tokenizer("gpt5"); }, {"gpt5", "byte"});
  CHECK_THROWS_AS(make_tokenizer("gpt5"), UsageError);
}

TEST_CASE("io: token shards", "[io]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("s.bin");
  {
    ShardWriter writer(path, TokenWidth::u16);
    writer.append(std::vector<int32_t>{50256});
    writer.append(std::vector<int32_t>{15496, 995});
    CHECK(!fs::exists(path));
    const ShardWriter::Written written = writer.finish();
    CHECK(written.tokens == 3);
    CHECK(written.bytes == 1030);
    CHECK(written.crc32 == 0xf914e1e1u);
  }
  // A shard, byte by byte: magic, version and count; then the tokens 50256, 15496 and 995 as u16.
  std::string known = from_hex("88d834010100000003000000");
  known.resize(1024, '\0');
  known += from_hex("50c4883ce303");
  CHECK(read_text(path) == known);
  const Shard shard(path);
  CHECK(shard.size() == 3);
  CHECK(shard.width() == TokenWidth::u16);
  CHECK(shard.max_token() == 50256);
  std::vector<int32_t> tokens(2);
  shard.read(1, tokens);
  CHECK(tokens == std::vector<int32_t>{15496, 995});
  CHECK_NOTHROW(shard.scan(50257));
  check_error([&] { shard.scan(50256); }, {path, "token 50256", "offset 1024"});
  check_error([&] { shard.scan(15496); }, {"token 50256"});
  check_error([&] { shard.read(2, tokens); }, {path, "2 tokens from 2 on were asked for, of 3"});

  ShardWriter wide(folder.file("wide.bin"), TokenWidth::u32);
  std::vector<int32_t> many(300000);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<int32_t>(i);
  wide.append(many);
  wide.finish();
  const Shard read_back(folder.file("wide.bin"));
  CHECK(read_back.width() == TokenWidth::u32);
  std::vector<int32_t> got(many.size());
  read_back.read(0, got);
  CHECK(got == many);
  check_error([&] { read_back.scan(200000); }, {"token 200000", "offset 801024", "0..199999"});
  CHECK(is_shard(path));
  CHECK(is_shard(folder.file("wide.bin")));

  ShardWriter narrow(folder.file("narrow.bin"), TokenWidth::u16);
  check_error([&] { narrow.finish(); }, {"without tokens"});
  check_error([&] { narrow.append(std::vector<int32_t>{65536}); }, {"65536"});
  check_error([&] { narrow.append(std::vector<int32_t>{-1}); }, {"-1"});
}

TEST_CASE("io: malformed shards are refused, with file and offset", "[io]") {
  const TemporaryFolder folder;
  const auto shard = [](int32_t magic, int32_t version, int32_t count, size_t body) {
    std::vector<int32_t> header(256, 0);
    header[0] = magic, header[1] = version, header[2] = count;
    return std::string(reinterpret_cast<const char*>(header.data()), 1024) + std::string(body, '\1');
  };
  struct Case {
    const char* name;
    std::string bytes;
    std::vector<std::string> words;
  };
  const Case cases[] = {
      {"empty", "", {"offset 0", "1024", "found 0"}},
      {"a few bytes", "abc", {"offset 0", "20240520", "found 0"}},
      {"text", std::string(5000, 'x'), {"offset 0", "20240520", "2021161080"}},
      {"cut header", shard(20240520, 1, 3, 6).substr(0, 1000), {"1024", "offset 1000"}},
      {"evaluation shard", shard(20240522, 1, 3, 6), {"offset 0", "20240522"}},
      {"version", shard(20240520, 2, 3, 6), {"offset 4", "expected version 1", "found 2"}},
      {"u32 with the version of u16", shard(20240801, 1, 3, 12), {"offset 4", "expected version 7", "found 1"}},
      {"no tokens", shard(20240520, 1, 0, 0), {"offset 8", "found 0"}},
      {"negative count", shard(20240520, 1, -3, 6), {"offset 8", "-3"}},
      {"cut", shard(20240520, 1, 3, 5), {"truncated", "1030", "offset 1029"}},
      {"cut u32", shard(20240801, 7, 3, 6), {"truncated", "1036", "offset 1030"}},
      {"tail", shard(20240520, 1, 3, 7), {"behind", "1030", "offset 1031"}},
  };
  for (const Case& c : cases) {
    INFO(c.name);
    write_text(folder.file("bad.bin"), c.bytes);
    std::vector<std::string> words = c.words;
    words.push_back("bad.bin");
    check_error([&] { Shard s(folder.file("bad.bin")); }, words);
  }
  check_error([&] { Shard s(folder.file("none.bin")); }, {"none.bin", "No such file"});
}

TEST_CASE("io: CSV rows past a step are cut on resume", "[io]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("t.csv"), header = "step,loss";
  CsvFile(path, header).row("1,0.5");
  CHECK(read_text(path) == "step,loss\n1,0.5\n");
  CsvFile(path, header).row("1,0.25");  // no step to resume from: the table is replaced
  CHECK(read_text(path) == "step,loss\n1,0.25\n");
  CsvFile(path, header, 1).row("2,0.2");
  CsvFile(path, header, 2).row("3,0.1");
  write_text(path, read_text(path) + "4,0.");  // an incomplete row, as a killed program leaves it
  CsvFile(path, header, 4).row("4,\"a,b\"");
  CHECK(read_text(path) == "step,loss\n1,0.25\n2,0.2\n3,0.1\n4,\"a,b\"\n");
  CsvFile(path, header, 2);
  CHECK(read_text(path) == "step,loss\n1,0.25\n2,0.2\n");
  CsvFile(folder.file("new.csv"), header, 7).row("8,1");
  CHECK(read_text(folder.file("new.csv")) == "step,loss\n8,1\n");
  check_error([&] { CsvFile(path, "step,ppl", 2); }, {path, "step,ppl", "step,loss"});
  check_error([&] { CsvFile(path, header, 2).row("3"); }, {path, "2 columns"});
  write_text(path, "step,loss\n1,2\nx,3\n");
  CsvFile(path, header, 2);
  CHECK(read_text(path) == "step,loss\n1,2\n");
}

TEST_CASE("io: a resume drops the damaged lines of a table, and no others", "[io]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("t.csv"), header = "step,loss,lr";
  const auto resumed = [&](const std::string& text, int64_t step) {
    write_text(path, text);
    CsvFile(path, header, step);
    return read_text(path);
  };
  const std::string top = header + "\n", zeros("\0\0\0\0", 4);
  for (const std::string& bad : {std::string("x,1,1"), zeros, zeros + "2,1,1", std::string("99999999999999999999,1,1"),
                                 std::string("2,1"), std::string("2,1,13,1,1"), std::string("")})
    CHECK(resumed(top + "1,1,1\n" + bad + "\n3,1,1\n4,1,1\n", 3) == top + "1,1,1\n3,1,1\n");
  // If the header is damaged, rows are kept. A table with other columns is not changed.
  for (const std::string& bad : {zeros, std::string("step,lost,lr"), std::string("step,loss\x01lr")})
    CHECK(resumed(bad + "\n1,1,1\n2,1,1\n", 3) == top + "1,1,1\n2,1,1\n");
  check_error([&] { resumed("step,ppl,rows\n1,1,1\n", 3); }, {path, "another table", "step,ppl,rows"});
  CHECK(read_text(path) == "step,ppl,rows\n1,1,1\n");
  write_text(path, "step,l\n1,1,1\n2,1\n3,1,1\n4,1,1\n");  // cut_csv accepts any header
  cut_csv(path, 3);
  CHECK(read_text(path) == "step,l\n1,1,1\n3,1,1\n");
}

TEST_CASE("io: JSON lines", "[io]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("h.jsonl");
  JsonLines(path).append({{"b", 1}, {"a", std::nan("")}});
  write_text(path, read_text(path) + "{\"torn");
  JsonLines(path).append({{"text", "two\nlines\xff"}});
  CHECK(read_text(path) == "{\"b\":1,\"a\":null}\n{\"text\":\"two\\nlines\xef\xbf\xbd\"}\n");
}

namespace {

// A std::map that counts iterator increments, and a JSON type whose objects are such maps.
int64_t map_steps = 0;
template <class Key, class Value, class Less, class Allocator>
struct CountedMap : std::map<Key, Value, Less, Allocator> {
  using Map = std::map<Key, Value, Less, Allocator>;
  using Map::Map;
  struct iterator : Map::iterator {
    iterator() = default;
    // Converts an iterator that std::map's functions return.
    iterator(typename Map::iterator base) : Map::iterator(base) {}
    iterator& operator++() {
      ++map_steps;
      Map::iterator::operator++();
      return *this;
    }
  };
};
using CountedJson = nlohmann::basic_json<CountedMap>;

}  // namespace

TEST_CASE("io: the time to read a key of a JSON object does not grow with the number of keys", "[io]") {
  const auto steps = [](int keys) {
    std::string text = "{";
    for (int i = 0; i < keys; ++i) text += fmt::format("{}\"t{}\":{{\"shape\":[1]}}", i == 0 ? "" : ",", i);
    map_steps = 0;
    const auto json = JsonBuilder<CountedJson>::build(text + "}", "the text", JsonComments::refused);
    CHECK(json.size() == static_cast<size_t>(keys));
    return map_steps;
  };
  const int64_t few = steps(500), many = steps(2000);
  CHECK(many <= 5 * few);  // 16 times as many if reading a key walked over all keys before it
}

TEST_CASE("io: JSON is parsed up to a limited depth, and shortened in messages", "[io]") {
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  CHECK(parse_json("{\"a\": [1, {}]}", "x")["a"][0] == 1);
  CHECK(parse_json(nested(64), "x").size() == 1);
  for (const int depth : {65, 300'000}) check_error([&] { parse_json(nested(depth), "the file"); }, {"the file", "64"});
  check_error([] { parse_json(std::string(300'000, '['), "the file"); }, {"the file", "64"});
  check_error([] { parse_json("{\"a\": 1,}", "the file"); }, {"the file", "column"});
  // The parser itself takes a NUL for the end.
  check_error([] { parse_json(std::string_view("[1]\0, 2]", 8), "the file"); }, {"the file", "byte 4 is NUL"});
  check_error([] { parse_json(R"([{"a": 1, "b": {"a": 2}}, {"a": 3, "a": 4}])", "the file"); },
              {"the file", "a twice"});
  CHECK(parse_json(R"([{"a": 1, "b": {"a": 2}}, {"a": 3}])", "x")[0]["b"]["a"] == 2);
  CHECK(parse_json("// c\n[1]", "x", JsonComments::allowed).size() == 1);
  CHECK_THROWS_AS(parse_json("// c\n[1]", "x"), Error);

  CHECK(brief(Json{{"a", "\xff"}}) == "{\"a\":\"\xef\xbf\xbd\"}");
  CHECK(brief(Json(std::string(1000, 'x'))).size() < 90);
  CHECK(shortened("ab\xc3\xa9", 4) == "ab\xc3\xa9");
  CHECK(shortened("ab\xc3\xa9z", 3) == "ab...");
  CHECK(shortened("a\xff\x1b[0m\n\xc3") == "a\\xff\\x1b[0m\\x0a\\xc3");  // control bytes are escaped
  CHECK(dump_json({{"a", "\xff"}}, 2) == "{\n  \"a\": \"\xef\xbf\xbd\"\n}");

  Json root = Json::object();
  set_json_key(root, "data.tokenizer=\xc3\xa9");
  CHECK(root["data"]["tokenizer"] == "\xc3\xa9");
  CHECK_THROWS_AS(set_json_key(root, "data.tokenizer=\xff"), UsageError);
}

TEST_CASE("io: triad inspect recognizes each kind of file", "[io]") {
  const TemporaryFolder folder;
  const float w[3] = {1, 3, std::nanf("")};
  write_safetensors(folder.file("m.safetensors"), std::vector<HostTensor>{{{"layer.w", DType::f32, {3}}, w}});
  ShardWriter shard(folder.file("s.bin"), TokenWidth::u16);
  shard.append(std::vector<int32_t>{7, 7, 50256});
  shard.finish();
  write_text(folder.file("t.txt"), "just some text");
  const auto inspect = [&](const std::string& name, int exit_code, const std::vector<std::string>& words) {
    const test::Outcome outcome = run_program("inspect " + folder.file(name));
    INFO(outcome.output);
    CHECK(outcome.exit_code == exit_code);
    for (const std::string& word : words) CHECK(outcome.output.find(word) != std::string::npos);
  };
  inspect("m.safetensors", 0, {"layer.w", "F32", "[3]", "1 tensor, 3 elements", "1 checksum, verified"});
  inspect("s.bin", 0, {"u16", "3 tokens", "largest token 50256", "66.67%"});
  write_text(folder.file("l.jsonl"), "{\"prompt\":\"abc\",\"completion\":\"d\"}\n{\"text\":\"efgh\"}\n");
  inspect("t.txt", 0, {"t.txt", "text: 1 document, 14 bytes"});
  inspect("l.jsonl", 0, {"JSONL: 2 documents, 8 bytes of text", "62.50% of the bytes are learned"});
  inspect("none", 1, {"none", "No such file"});
}
