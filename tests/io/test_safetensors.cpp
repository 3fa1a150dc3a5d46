// io/safetensors: round trips, known bytes, and malformed files.
#include "io/safetensors.h"

#include <cstring>
#include <filesystem>

#include "engine/check.h"
#include "io/file.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using triad::test::check_error;
using triad::test::read_text;
using triad::test::TemporaryFolder;
using triad::test::write_text;
namespace fs = std::filesystem;

namespace {

std::string with_length(const std::string& header, const std::string& data) {
  const uint64_t n = header.size();
  return std::string(reinterpret_cast<const char*>(&n), 8) + header + data;
}

}  // namespace

TEST_CASE("io: safetensors round trip, order, padding and checksums", "[io]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("t.safetensors");
  const std::vector<float> w = {1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> n = {-7};
  const std::vector<bf16> h = {bf16(0.5f), bf16(1.5f), bf16(2.5f)};
  const uint8_t byte = 9;
  const std::vector<HostTensor> tensors = {{{"byte", DType::u8, {}}, &byte},
                                           {{"w", DType::f32, {2, 3}}, w.data()},
                                           {{"h", DType::bf16, {3}}, h.data()},
                                           {{"a", DType::f32, {0, 4}}, nullptr},
                                           {{"n", DType::i64, {1}}, n.data()}};
  write_safetensors(path, tensors, {{"note", "x"}});
  const SafetensorsFile file(path);
  std::vector<std::string> names;
  for (const TensorEntry& entry : file.entries()) {
    names.push_back(entry.name);
    CHECK(entry.begin % size_of(*entry.engine_dtype()) == 0);
  }
  CHECK(names == std::vector<std::string>{"n", "a", "w", "h", "byte"});
  CHECK(file.metadata().at("format") == "pt");
  CHECK(file.metadata().at("note") == "x");
  CHECK(std::memcmp(file.read(file.at("w")).data(), w.data(), 24) == 0);
  CHECK(std::memcmp(file.read(file.at("h")).data(), h.data(), 6) == 0);
  CHECK(file.read(file.at("a")).empty());
  CHECK(file.at("byte").shape.empty());
  CHECK(file.at("w").str() == "F32[2,3]");
  CHECK(file.find("none") == nullptr);
  check_error([&] { file.at("none"); }, {path, "none"});
  // The order in which tensors are written does not change the file.
  SafetensorsWriter writer(folder.file("u"),
                           {tensors[4].spec, tensors[3].spec, tensors[0].spec, tensors[1].spec, tensors[2].spec},
                           {{"note", "x"}});
  writer.write("byte", {reinterpret_cast<const std::byte*>(&byte), 1});
  writer.write("w", std::as_bytes(std::span(w).first(2)));
  writer.write("n", std::as_bytes(std::span(n)));
  writer.write("w", std::as_bytes(std::span(w).subspan(2)));
  check_error([&] { writer.finish(); }, {"tensor h", "6 bytes", "0 were"});
  writer.write("h", std::as_bytes(std::span(h)));
  check_error([&] { writer.write("h", std::as_bytes(std::span(h))); }, {"tensor h"});
  check_error([&] { writer.write("q", {}); }, {"tensor q"});
  CHECK(!fs::exists(folder.file("u")));
  writer.finish();
  CHECK(read_text(folder.file("u")) == read_text(path));
  // A flipped bit is detected, and the error names its tensor.
  std::string damaged = read_text(path);
  damaged[static_cast<size_t>(file.at("h").begin) + 1] ^= 4;
  write_text(folder.file("damaged"), damaged);
  const SafetensorsFile bad(folder.file("damaged"));
  CHECK_NOTHROW(bad.read(bad.at("w")));
  check_error([&] { bad.read(bad.at("h")); }, {"damaged", "tensor h", "CRC-32"});
  check_error([&] { SafetensorsWriter(folder.file("v"), {{"x", DType::u8, {}}, {"x", DType::u8, {}}}); }, {"x"});
  CHECK(is_safetensors(path));
}

TEST_CASE("io: safetensors known bytes", "[io]") {
  const TemporaryFolder folder;
  // A complete file, byte by byte: the header's length in 8 bytes, the header in 88 bytes, and 8 data bytes.
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}})";
  const std::string padded = header + std::string((8 - header.size() % 8) % 8, ' ');
  CHECK(padded.size() == 88);
  write_text(folder.file("known"), with_length(padded, std::string(8, '\0')));
  const SafetensorsFile known(folder.file("known"));
  CHECK(known.at("w").engine_dtype() == DType::bf16);
  CHECK(known.at("w").shape == std::vector<int64_t>{2, 2});
  CHECK(known.at("w").begin == 96);
  // SafetensorsWriter writes the same file with a checksum in the header: eight zero bytes' CRC-32, which is 6522df69
  // according to zlib.
  const uint64_t zeros = 0;
  write_safetensors(folder.file("ours"), std::vector<HostTensor>{{{"w", DType::bf16, {2, 2}}, &zeros}});
  std::string ours = R"({"__metadata__":{"format":"pt","crc32/w":"6522df69"},)"
                     R"("w":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}})";
  ours.resize((ours.size() + 7) / 8 * 8, ' ');
  CHECK(read_text(folder.file("ours")) == with_length(ours, std::string(8, '\0')));
  // A file as other writers may write it: no padding, no metadata, a dtype that the engine does not have, and tensors
  // in another order.
  write_text(folder.file("other"), with_length(R"({"b":{"dtype":"F16","shape":[1],"data_offsets":[4,6]},)"
                                               R"("a":{"shape":[],"dtype":"F32","data_offsets":[0,4]}})",
                                               "abcdef"));
  const SafetensorsFile other(folder.file("other"));
  CHECK(other.entries()[0].name == "a");
  CHECK(!other.at("b").engine_dtype());
  CHECK(std::memcmp(other.read(other.at("b")).data(), "ef", 2) == 0);
}

TEST_CASE("io: safetensors of every dtype of the format are read, and inspect lists them", "[io]") {
  const TemporaryFolder folder;
  struct Case {
    const char* dtype;
    int64_t elements, bytes;
  };
  const Case cases[] = {{"F8_E8M0", 3, 3}, {"F8_E4M3FNUZ", 3, 3}, {"F8_E5M2FNUZ", 3, 3}, {"F6_E2M3", 4, 3},
                        {"F6_E3M2", 8, 6}, {"F4", 6, 3},          {"C64", 2, 16},        {"F8_E4M3", 1, 1},
                        {"F8_E5M2", 1, 1}, {"F4", 0, 0},          {"BOOL", 2, 2},        {"U64", 1, 8}};
  std::string header = "{";
  int64_t end = 0;
  for (size_t i = 0; i < std::size(cases); ++i) {
    header += fmt::format(R"({}"w{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", i > 0 ? "," : "", i,
                          cases[i].dtype, cases[i].elements, end, end + cases[i].bytes);
    end += cases[i].bytes;
  }
  const std::string path = folder.file("all.safetensors");
  write_text(path, with_length(header + "}", std::string(static_cast<size_t>(end), 'x')));
  const SafetensorsFile file(path);
  const test::Outcome inspected = test::run_program("inspect " + path);
  INFO(inspected.output);
  CHECK(inspected.exit_code == 0);
  for (size_t i = 0; i < std::size(cases); ++i) {
    INFO(cases[i].dtype);
    const TensorEntry& entry = file.at(fmt::format("w{}", i));
    CHECK(entry.numel() == cases[i].elements);
    CHECK(entry.bytes() == cases[i].bytes);
    CHECK(!entry.engine_dtype());
    CHECK(test::has(inspected.output, fmt::format("{} ", cases[i].dtype)));
  }
}

TEST_CASE("io: malformed safetensors are refused, with file and position", "[io]") {
  const TemporaryFolder folder;
  struct Case {
    const char* name;
    std::string bytes;
    std::vector<std::string> words;
  };
  const auto entry = [](const std::string& shape, const std::string& offsets, const std::string& dtype = "\"F32\"") {
    return R"({"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  const auto one = [&](const std::string& e, size_t data = 8) {
    return with_length("{\"w\":" + e + "}", std::string(data, 'x'));
  };
  const auto two = [&](const std::string& a, const std::string& b) {
    return with_length("{\"a\":" + a + ",\"b\":" + b + "}", std::string(8, 'x'));
  };
  const Case cases[] = {
      {"empty", "", {"offset 0"}},
      {"deep header", with_length("{\"w\":" + std::string(300'000, '['), ""), {"offset 8", "64 deep"}},
      {"cut length", "1234567", {"offset 7"}},
      {"absurd length", std::string(8, '\x7f') + "{}", {"offset 0", "100000000"}},
      {"cut header", with_length("{}", "").substr(0, 9), {"truncated", "offset 9"}},
      {"no header", with_length("", ""), {"offset 8"}},
      {"no object", with_length("[]", ""), {"offset 8", "91"}},
      {"no JSON", with_length("{\"w\":", ""), {"offset 8", "JSON"}},
      {"junk after the object", with_length("{} x", ""), {"JSON"}},
      {"not UTF-8", with_length("{\"\xff\":1}", ""), {"JSON"}},
      {"tensor twice", two(entry("[1]", "[0,4]"), "1, \"a\":" + entry("[1]", "[4,8]")), {"a twice"}},
      {"entry is no object", one("3"), {"tensor w", "3"}},
      {"no dtype", one(R"({"shape":[2],"data_offsets":[0,8]})"), {"tensor w", "dtype"}},
      {"no shape", one(R"({"dtype":"F32","data_offsets":[0,8]})"), {"tensor w", "shape"}},
      {"no offsets", one(R"({"dtype":"F32","shape":[2]})"), {"tensor w", "data_offsets"}},
      {"unknown dtype", one(entry("[2]", "[0,8]", "\"F33\"")), {"tensor w", "F33"}},
      {"dtype no string", one(entry("[2]", "[0,8]", "4")), {"tensor w", "dtype 4"}},
      {"half a byte", one(entry("[3]", "[0,2]", "\"F4\"")), {"tensor w", "F4[3] is 12 bits"}},
      {"bits against offsets", one(entry("[4]", "[0,8]", "\"F6_E2M3\"")), {"tensor w", "8 bytes", "3"}},
      {"shape no list", one(entry("2", "[0,8]")), {"tensor w", "shape"}},
      {"negative size", one(entry("[-2]", "[0,8]")), {"tensor w", "-2"}},
      {"fractional size", one(entry("[2.5]", "[0,8]")), {"tensor w", "2.5"}},
      {"huge size", one(entry("[4611686018427387904,4]", "[0,8]")), {"tensor w", "too large"}},
      {"size past 64 bits", one(entry("[99999999999999999999]", "[0,8]")), {"tensor w"}},
      {"one offset", one(entry("[2]", "[8]")), {"tensor w", "data_offsets"}},
      {"offsets reversed", one(entry("[2]", "[8,0]")), {"tensor w", "-8"}},
      {"size against shape", one(entry("[3]", "[0,8]")), {"tensor w", "8 bytes", "12"}},
      {"past the end", one(entry("[4]", "[0,16]")), {"truncated", "tensor w"}},
      {"bytes after the last", one(entry("[1]", "[0,4]")), {"last tensor"}},
      {"hole at the start", one(entry("[1]", "[4,8]")), {"tensor w", "hole"}},
      {"hole", two(entry("[]", "[0,4]"), entry("[0]", "[8,8]")), {"tensor b", "hole"}},
      {"overlap", two(entry("[2]", "[0,8]"), entry("[1]", "[4,8]")), {"tensor b", "overlapping"}},
      {"metadata no object", with_length(R"({"__metadata__":[]})", ""), {"__metadata__"}},
      {"metadata no string", with_length(R"({"__metadata__":{"a":1}})", ""), {"__metadata__", "a is 1"}},
  };
  for (const Case& c : cases) {
    INFO(c.name);
    write_text(folder.file("bad.safetensors"), c.bytes);
    std::vector<std::string> words = c.words;
    words.push_back("bad.safetensors");
    check_error([&] { SafetensorsFile file(folder.file("bad.safetensors")); }, words);
  }
}
