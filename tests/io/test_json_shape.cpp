// What is JSON or meant to be (io/data/format/json_shape.h), and what is prose or code that begins like it: the same
// from a file as from a pipe.
#include <unistd.h>

#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "engine/process/text.h"
#include "io/data/format/text_format.h"
#include "tests/support/corpus.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
using namespace std::literals;

namespace {

std::string_view word(Content content) { return content == Content::text ? "text" : "jsonl"; }

// "text", "jsonl", or why the file is refused.
std::string held_by(const std::string& path) {
  try {
    return std::string(word(content_of(path)));
  } catch (const Error& e) { return e.what(); }
}

std::string held_by_pipe(const std::string& bytes) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  std::thread writer([&] {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t n = ::write(ends[1], bytes.data() + at, bytes.size() - at);
      if (n <= 0) break;
      at += static_cast<size_t>(n);
    }
    ::close(ends[1]);
  });
  std::string held = held_by("/dev/fd/" + std::to_string(ends[0]));
  std::string rest(1 << 16, '\0');
  while (::read(ends[0], rest.data(), rest.size()) > 0) continue;  // what was not needed for the decision
  writer.join();
  ::close(ends[0]);
  return held;
}

std::string repeated(std::string_view text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

const std::string kRecord = "{\"text\":\"a\"}\n", kArray = "JSON array", kObject = "JSON over several lines",
                  kValues = "JSON strings, numbers or words";

struct ShapeRow {
  std::string bytes, expected;  // expected: "text", "jsonl", or a word of the refusal
  std::string named = {};       // the same for a file a.jsonl; empty: as `expected`, but "jsonl" for "text"
};

// What is JSON, or is meant to be.
const std::vector<ShapeRow> kJson = {
    // arrays that no strict parser takes
    {"[1, NaN]\n", kArray, "jsonl"},
    {"[\n  NaN,\n  -Infinity,\n  Infinity\n]\n", kArray},
    {"[0.5, nan, inf]", kArray, "jsonl"},
    {"[null, None, True, false]", kArray, "jsonl"},
    {"[1e400, -0.0]", kArray, "jsonl"},
    {"[1, 2, ]\n", kArray, "jsonl"},
    {"[\n\"one\",\n\"two\",\n]\n", kArray},
    {"['one', 'it\\'s']\n", kArray, "jsonl"},
    {"[\"a \\x escape\", \"b\"]", kArray, "jsonl"},
    {"[[1, 2], [3, [NaN]]]\n", kArray, "jsonl"},
    {"[{}, {}]\n", kArray, "jsonl"},
    // cut arrays
    {"[1, 2", kArray},
    {"[1, 2,\n", kArray},
    {"[\"one\", \"tw", kArray},
    {"[\n\"one\",\n\"two\"\n", kArray},
    {"[[1, 2], [3,", kArray},
    {"[1, tr", kArray},
    {"[1, -", kArray},
    {"[" + repeated("\"a string of an array\",\n", 100'000), kArray},
    {"[{\"text\":\"a\"},\n{\"te", kArray},
    {"[\n" + repeated("{\"text\":\"a\"},\n", 3), kArray},
    // arrays of records with a damage, and with something behind them
    {"[{\"text\": \"a\"},\n{\"text\" \"b\"},\n{\"text\": \"c\"}\n]\n", kArray},
    {"[{\"text\": \"raw\nline feed\"}]\n", kArray},
    {"[{\"text\": \"a\"}] and more", kArray, "jsonl"},
    // several arrays
    {"[1, 2]\n[3]\n", kArray, "jsonl"},
    {"[1]\n\n[2, NaN]\n[3", kArray, "jsonl"},
    {"[1][2]", kArray, "jsonl"},
    // strings, numbers, words
    {"\"one\"\n\"two\"\n", kValues, "jsonl"},
    {"\n\"one\"\r\n\"two\"\r\n", kValues, "jsonl"},
    {"\"one\"\n\"two\"\n\"cu", kValues, "jsonl"},
    {"\"only a string\"", kValues, "jsonl"},
    {"\"A document.\\nIn one string.\"\n", kValues, "jsonl"},
    {"\"" + repeated("a document in one string\\n", 60'000) + "\"", kValues, "jsonl"},
    {"1\n2\n3.5e-1\n", kValues, "jsonl"},
    {"null\n\"a\"\nNaN\n", kValues, "jsonl"},
    {"true\nfalse\n", kValues, "jsonl"},
    {repeated("\"a line\"\n", 300'000), kValues, "jsonl"},
    // records after a bad first line
    {"null\n" + kRecord, "jsonl"},
    {"[1]\n" + kRecord + kRecord, "jsonl"},
    {"[{\"text\":\"a\"}]\n" + kRecord, "jsonl"},
    {"[\"a\", \"b\"]\n" + kRecord, "jsonl"},
    {"[\n" + kRecord + kRecord, "jsonl"},
    {"[{\"text\":\"a\"},\n" + kRecord + kRecord, "jsonl"},
    {"{\n  \"text\": \"a\"\n}\n" + kRecord, "jsonl"},
    {"{\n  \"text\": \"a\",\n" + kRecord, "jsonl"},
    {"Loading ...\n" + repeated(kRecord, 20), "jsonl"},
    {"make.py:3: Warning: old\n  import old\n\n" + repeated(kRecord, 100) + "{\"te", "jsonl"},
    // objects
    {"{\"text\":\"a\"}", "jsonl"},
    {"{ \"text\" : \"a\" }\n" + kRecord, "jsonl"},
    {"{\"tex\n" + kRecord, "jsonl"},
    {"{\"text\"\n" + kRecord, "jsonl"},
    {"{'text': 'of Python'}\n", "jsonl"},
    {"{}\n{}\n", "jsonl"},
    {"{\"data\": [\n{\"text\":\"a\"},\n{\"text\":\"b\"}\n]}\n", kObject},
    {"{\n  \"text\": \"a\"\n}\n{\n  \"text\": \"b\"\n}\n", kObject},
    {"{\n  \"a\": {},\n  \"b\": [\n    1\n  ]\n", kObject},
};

// What begins like JSON.
const std::vector<std::string> kNoJson = {
    "[1984] is a year",
    "[1984]\n\nIt was a bright cold day.\n",
    "[Chorus]\nla la\n",
    "[1] A footnote.\n[2] Another.\n",
    "[1]\nSmith, J. wrote.\n\n[2]\nAnother.\n",
    "[1][2] show that\n",
    "[1, 2] show that\n",
    "[1, 2; 3, 4]\n",
    "[12, p. 4] says\n",
    "[2020, 2021, and 2022]\n",
    "[1] 1984\n[2] 1985\n",
    "[1]: http://example.com\n",
    "[true] stories\n[false] ones\n",
    "[INFO] started\n[WARN] {\"a\": 1}\n",
    "[2026-11-28 10:00:00] started\n",
    "[10:00] started\n",
    "[link](x) and [another](y)\n",
    "[\"A quotation\"](x)\n",
    "[\"Hello,\" she said.]\n",
    "[\"Hello,\" she said\n",
    "[\"Hello\nworld\n",
    "\"Hello\n" + repeated("a line\n", 300'000),
    "3." + repeated("14159265358979323846", 100'000),
    "['tis the season]\n",
    "['tis the season",
    "[section]\nkey = 1\n",
    "[package]\nname = \"a\"\n",
    "[[bin]]\nname = \"a\"\n",
    "[[1]] is a matrix\n",
    "[x for x in y]\n",
    "[a, b] = f(1)\n",
    "[\"a\", \"b\"].forEach(f);\n",
    "[]\nint main() {}\n",
    "[] { return 1; }();\n",
    "[{{site}}](x)\nhello\n",
    "[{:a 1}\n {:b 2}]\n",
    "[... text is missing ...]\n",
    "[- 1]",
    "\"Hello,\" she said.\n",
    "\"Hello, she said",
    "\"Hello,\nworld\"\n",
    "\"Hello.\"\n\nShe went.\n",
    "\"one\"\n\"two\"\nthree\n",
    "\"one\" \"two\"\n",
    "\"a\",\"b\"\n\"c\",\"d\"\n",
    "1984",
    "3.14159265358979323846\n",
    "null\n",
    "1984\n\nIt was a bright cold day.\n",
    "1. First\n2. Second\n",
    "0 1 8 27 64\n",
    "0 1 8 27 64 125\n216 343\n",
    "1\t2\n3\t4\n",
    "1,2\n3,4\n",
    "007\n008\n",
    "-1 is a number\n",
    "- an item\n- another\n",
    "--- a/x\n+++ b/x\n",
    "true stories\n",
    "truth\nnull and void\n",
    "null void\n",
    "Infinity is long.\n",
    "Nan went home.\n",
    "{ int x; }\n",
    "{ \"a\", \"b\" };\n",
    "{\"a\", \"b\"},\n{\"c\", \"d\"}\n",
    "{\"Well,\" she said}\n",
    "{'a', 'b'}\n",
    "{'tis the season}\n",
    "{} is the empty set\n",
    "{}\n\nThe empty set.\n",
    "{name: value}\n",
    "{{ template }}\n",
    "{% if x %}template{% endif %}\n",
    "{\\rtf1 text}\n",
    "{\\bf bold}\n",
    "{#fragment}\n",
    "@article{key,\n  title = {A title},\n  year = 1984\n}\n",
    "int main(void) { return 0; }\n",
    "#include <stdio.h>\nint a[] = {1, 2};\n",
    "// a comment\n{\"a\": 1}\n",
    "<!DOCTYPE html>\n<html>\n",
    "<?xml version=\"1.0\"?>\n",
    "An example:\n{\"a\": 1}\n{\"a\": 2}\n",
    "An example:\n{\"a\": 1}\n{\"a\": 2}\n{\"a\": 3}\nThat was it.\n",
    "An example:\n" + repeated("{\"a\": 1}\n", 50) + "That was it.\n",
    repeated("A long text. ", 30) + "Its end:\n" + repeated("{\"a\": 1}\n", 4),
    "a,b\n{\"x\"},1\n",
    "GET /x\n{\"a\": 1}\n",
};

void check(const ShapeRow& row, const std::string& found, const std::string& expected, std::string_view where) {
  INFO(where << ": " << printable(row.bytes.substr(0, 80)) << "\nexpected " << expected << ", found " << found);
  if (expected == "text" || expected == "jsonl")
    CHECK(found == expected);
  else
    CHECK(has(found, expected));
}

}  // namespace

TEST_CASE("text format: what is JSON or meant to be is no text, what begins like it is", "[data]") {
  const TemporaryFolder folder;
  std::vector<ShapeRow> rows = kJson;
  for (const std::string& bytes : kNoJson) rows.push_back({bytes, "text"});
  for (const ShapeRow& row : rows) {
    for (const std::string name : {"a", "a.txt", "a.jsonl"}) {
      write_text(folder.file(name), row.bytes);
      const std::string named = !row.named.empty() ? row.named : row.expected == "text" ? "jsonl" : row.expected;
      const bool page = row.bytes.starts_with('<');
      check(row, held_by(folder.file(name)), name != "a.jsonl" ? row.expected : page ? "HTML or XML" : named, name);
    }
    check(row, held_by_pipe(row.bytes), row.expected, "pipe");
    const std::string marked = "\xef\xbb\xbf\n " + row.bytes;
    if (!row.bytes.starts_with('\n')) check(row, held_by_pipe(gzip(marked)), row.expected, "marked, compressed, pipe");
  }
}
