// Byte-level BPE: tokens equal Hugging Face's `tokenizers` library's, and decoding restores any bytes.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>

#include "io/file.h"
#include "io/json_config.h"
#include "io/tokenizer/bpe.h"
#include "io/tokenizer/bpe_tokenizer.h"
#include "io/tokenizer/pattern.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/tokenizer_cases.h"

using namespace triad;
using triad::test::check_error;
using triad::test::known_cases;
using triad::test::TemporaryFolder;
using triad::test::tokenizer_of;

namespace {

// Returns random text with words, spaces, whole and truncated UTF-8 characters, and arbitrary bytes.
std::string random_pieces(std::mt19937& random, size_t pieces) {
  const std::vector<std::string> kinds = {"the ",
                                          " tokenizer",
                                          "  ",
                                          "\n\n",
                                          "\t",
                                          "it's ",
                                          "DON'T",
                                          "<|endoftext|>",
                                          "<|endof",
                                          "\xe4\xb8\xad\xe6\x96\x87",
                                          "\xe4\xb8",
                                          "\xd8\xb9",
                                          "\xf0\x9f\x91\x8d",
                                          "\xf0\x9f",
                                          "\xff",
                                          "\xed\xa0\x80",
                                          "\xc0\xaf",
                                          "1234",
                                          "...",
                                          " {",
                                          "\xcc\x81",
                                          "e"};
  std::string text;
  for (size_t i = 0; i < pieces; ++i) {
    const auto kind = random() % (kinds.size() + 4);
    text += kind < kinds.size() ? kinds[kind] : std::string(1, static_cast<char>(random()));
  }
  return text;
}

// Returns true if encoding changes the text: through a normalizer or, in the case "flags", through a prefix space or
// tokens that strip spaces.
bool changes_text(const Json& known) { return !known["tokenizer"]["normalizer"].is_null() || known["name"] == "flags"; }

std::string python() {
  const char* named = std::getenv("TRIAD_PYTHON");
  return named != nullptr ? named : "python3";
}

// Returns a file's records; each is a length in bytes (u32) and these bytes.
std::vector<std::string> read_records(const std::string& path) {
  const std::string all = read_file(path);
  std::vector<std::string> records;
  for (size_t at = 0; at < all.size();) {
    uint32_t size = 0;
    std::memcpy(&size, all.data() + at, sizeof size);
    records.push_back(all.substr(at + sizeof size, size));
    at += sizeof size + size;
  }
  return records;
}

}  // namespace

TEST_CASE("tokenizers: known answers of the tokenizers library", "[tokenizers]") {
  const TemporaryFolder folder;
  for (const Json& known : known_cases()) {
    INFO(known["name"]);
    const auto tokenizer = tokenizer_of(folder, known);
    CHECK(tokenizer->eot() == 0);
    for (size_t i = 0; i < known["texts"].size(); ++i) {
      const auto text = known["texts"][i].get<std::string>();
      INFO(text);
      const std::vector<int32_t> tokens = tokenizer->encode(text);
      CHECK(tokens == known["ids"][i].get<std::vector<int32_t>>());
      if (!changes_text(known)) CHECK(tokenizer->decode(tokens) == text);
    }
  }
}

TEST_CASE("tokenizers: decoding restores every byte string, encoded whole or in parts", "[tokenizers]") {
  const TemporaryFolder folder;
  std::mt19937 random(5);
  for (const Json& known : known_cases()) {
    if (changes_text(known)) continue;
    INFO(known["name"]);
    const auto tokenizer = tokenizer_of(folder, known);
    std::string bytes;
    for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
    for (int i = 0; i < 200; ++i) {
      const std::string text = i == 0 ? bytes : random_pieces(random, 1 + random() % 60);
      const std::vector<int32_t> tokens = tokenizer->encode(text);
      CHECK(tokenizer->decode(tokens) == text);
      // The text is encoded in parts. Tokens that append_prefix appends are final, and it consumes some text if it is
      // given enough.
      std::vector<int32_t> parts;
      size_t done = 0;
      for (size_t given = 1 + random() % 20; done + given < text.size();) {
        const size_t took = tokenizer->append_prefix(std::string_view(text).substr(done, given), parts);
        CHECK(took <= given);
        done += took;
        given = took > 0 ? 1 + random() % 20 : given * 2;
      }
      tokenizer->append(std::string_view(text).substr(done), parts);
      CHECK(parts == tokens);
    }
    std::vector<int32_t> most;
    const std::string prose =
        std::string(300, 'x') + "The quick brown fox jumps over the lazy dog. And again, and so on.";
    CHECK(tokenizer->append_prefix(prose, most) > 300);
  }
}

TEST_CASE("tokenizers: spaces, letters, digits and normal forms follow the library's Unicode version", "[tokenizers]") {
  const auto matches = [](const char* regex, const std::string& text) {
    const Pattern pattern(regex, "here");
    Pattern::Matcher matcher(pattern);
    Pattern::Span span;
    return pattern.find(matcher, text, 0, false, span) == Pattern::Found::match;
  };
  const std::string mongolian = "\xe1\xa0\x8e", nel = "\xc2\x85", ideographic = "\xe3\x80\x80", zero = "\xe2\x80\x8b";
  for (const std::string& space : {std::string(" "), std::string("\x0b"), nel, ideographic}) {
    CHECK(matches(R"(\s)", space));
    CHECK(!matches(R"(\S)", space));
    CHECK(!matches(R"([^\s])", space));
  }
  for (const std::string& none : {mongolian, zero, std::string("a")}) {
    CHECK(!matches(R"(\s)", none));
    CHECK(matches(R"(\S)", none));
  }
  const std::string letter = "\xe1\xb2\x89", han = "\xf0\xae\xaf\xb0",
                    digit = "\xf0\x90\xb5\x80";  // characters new in Unicode 16, 15.1 and 16
  CHECK(matches(R"(\p{L})", letter));
  CHECK(matches(R"(\p{Lu})", letter));
  CHECK(matches(R"([\p{L}])", han));
  CHECK(matches(R"(\p{Nd})", digit));
  CHECK(!matches(R"(\P{L})", han));
  CHECK(!matches(R"([^\p{L}\p{N}])", digit));
  // Without regard to case, U+017F, the long s, matches s.
  CHECK(matches("(?i:'s)", "'\xc5\xbf"));
  // Normalization orders combining marks by their class, except marks that are newer than Unicode 9.
  const std::string above = "\xcc\x95", overlay = "\xcc\xb4", later = "\xe1\xab\x86";
  CHECK(normalize(NormalForm::nfd, "a" + above + overlay) == "a" + overlay + above);
  CHECK(normalize(NormalForm::nfd, "a" + above + later) == "a" + above + later);
  CHECK(normalize(NormalForm::nfc, "xe\xcc\x81y \xe2\x84\xab") == "x\xc3\xa9y \xc3\x85");
  CHECK(normalize(NormalForm::nfkc, "a\xef\xac\x83") == "affi");
}

TEST_CASE("tokenizers: patterns that ignore case, where both libraries fold alike", "[tokenizers]") {
  struct Case {
    const char *regex, *text;
    bool matches;
  };
  const Case cases[] = {
      {"(?i:'(?:[sdmt]|ll|ve|re))", "'LL", true},
      {"(?i:ss?)", "S", true},
      {"(?i:s+)x", "s\xc5\xbfx", true},  // U+017F, the long s
      {"(?i:s[s])", "\xc3\x9f", false},  // U+00DF matches two letters in a row, not a class
      {"(?i:s)|ss", "ss", true},
      {"(?i)s|s", "S", true},
      {"ss|\xc3\x9f", "\xc3\x9f", true},
      {"(?i:\xc3\xa9)", "\xc3\x89", true},  // e with an accent
      {R"((?i:\p{N}[\s\d]))", "1 ", true},
      {R"((?i:[^a-r]))", "Q", false},
      {R"((?:(?i:a)b))", "AB", false},
  };
  for (const Case& c : cases) {
    INFO(c.regex);
    const Pattern pattern(c.regex, "here");
    Pattern::Matcher matcher(pattern);
    Pattern::Span span;
    CHECK((pattern.find(matcher, c.text, 0, false, span) == Pattern::Found::match) == c.matches);
  }
}

TEST_CASE("tokenizers: word characters are Unicode 16's", "[tokenizers]") {
  for (const uint32_t point : {0x41u,    0x5fu,    0x39u,    0xaau,    0x301u,   0x203fu,  0x2160u,  0x200du,
                               0x24b6u,  0x1f130u, 0x897u,   0x1c89u,  0xa7cbu,  0x105c0u, 0x10d40u, 0x10efcu,
                               0x113b8u, 0x11f02u, 0x16100u, 0x1ccf0u, 0x1e5d0u, 0x2ebf0u, 0x31350u, 0x323afu}) {
    INFO(fmt::format("U+{:04X}", point));
    CHECK(is_word(point));
  }
  for (const uint32_t point :
       {0x20u, 0x2du, 0xb2u, 0x200bu, 0x2029u, 0x1f600u, 0x1b4eu, 0x2427u, 0x1cc00u, 0x10d6eu, 0x1d2c0u, 0x323b0u}) {
    INFO(fmt::format("U+{:04X}", point));
    CHECK(!is_word(point));
  }
  const TemporaryFolder folder;
  const auto tokenizer = tokenizer_of(folder, known_cases().front(), [](Json& j) {
    j["added_tokens"].push_back({{"id", 900}, {"content", "if"}, {"single_word", true}, {"special", false}});
  });
  const auto has_token = [&](const std::string& text) {
    const std::vector<int32_t> tokens = tokenizer->encode(text);
    return std::count(tokens.begin(), tokens.end(), 900) == 1;
  };
  CHECK(has_token("if \xe1\xb2\x89"));
  CHECK(!has_token("if\xe1\xb2\x89"));  // U+1C89 is a letter
}

TEST_CASE("tokenizers: byte_fallback changes nothing where all bytes are tokens", "[tokenizers]") {
  const TemporaryFolder folder;
  for (const Json& known : known_cases()) {
    INFO(known["name"]);
    const auto tokenizer = tokenizer_of(folder, known, [](Json& j) { j["model"]["byte_fallback"] = true; });
    for (size_t i = 0; i < known["texts"].size(); ++i)
      CHECK(tokenizer->encode(known["texts"][i].get<std::string>()) == known["ids"][i].get<std::vector<int32_t>>());
  }
}

TEST_CASE("tokenizers: both ways to merge a word agree", "[tokenizers]") {
  const TemporaryFolder folder;
  std::mt19937 random(6);
  std::array<int32_t, 256> bytes{};
  for (int i = 0; i < 256; ++i) bytes[static_cast<size_t>(i)] = i;
  std::vector<Bpe::Merge> merges;  // random merges over a three-letter alphabet
  for (int32_t id = 256; id < 320; ++id) {
    const auto any = [&] {
      const auto n = static_cast<int32_t>(random() % static_cast<uint32_t>(3 + id - 256));
      return n < 3 ? 'a' + n : 256 + n - 3;
    };
    merges.push_back({any(), any(), id});
  }
  const Bpe bpe(bytes, merges);
  BpeScratch scratch;
  for (int i = 0; i < 3000; ++i) {
    std::string word(random() % 300, 'a');
    for (char& c : word) c = static_cast<char>('a' + random() % 3);
    std::vector<int32_t> by_scan, by_heap, either;
    bpe.encode_short(word, scratch, by_scan);
    bpe.encode_long(word, scratch, by_heap);
    bpe.encode(word, scratch, either);
    CHECK(by_scan == by_heap);
    CHECK(either == by_heap);
    either.clear();
    bpe.encode(word, scratch, either);  // a word's second encoding reads the cache
    CHECK(either == by_heap);
  }
}

TEST_CASE("tokenizers: special tokens are encoded as text if requested", "[tokenizers]") {
  const TemporaryFolder folder;
  const Json known = known_cases().front();
  const std::string text = "one<|endoftext|>two";
  const auto special = tokenizer_of(folder, known)->encode(text);
  CHECK(std::count(special.begin(), special.end(), 0) == 1);
  const auto plain = tokenizer_of(folder, known, [](Json&) {}, {.special_as_text = true});
  const std::vector<int32_t> tokens = plain->encode(text);
  CHECK(std::count(tokens.begin(), tokens.end(), 0) == 0);
  CHECK(plain->decode(tokens) == text);
}

TEST_CASE("tokenizers: long runs are matched, and exponential backtracking is refused", "[tokenizers]") {
  const TemporaryFolder folder;
  for (const Json& known : known_cases()) {
    const std::string name = known["name"];
    if (name != "gpt2" && name != "llama3" && name != "o200k" && name != "deepseek") continue;
    const auto tokenizer = tokenizer_of(folder, known);
    for (const char* character : {" ", "\n", "A", "a", "1", "!", "\xe4\xb8\xad", "\xc3\xa9", "\xff"})
      for (const char* end : {"", "x", "\n"}) {
        std::string text;
        while (text.size() < 200'000) text += character;
        text += end;
        INFO(name << " " << character << " " << end);
        CHECK(tokenizer->decode(tokenizer->encode(text)) == text);
      }
  }
  const auto slow = tokenizer_of(folder, known_cases().front(), [](Json& j) {
    const Json split = {
        {"type", "Split"}, {"pattern", {{"Regex", "(a+)+b"}}}, {"behavior", "Isolated"}, {"invert", false}};
    j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, j["pre_tokenizer"]}}};
  });
  check_error([&] { slow->encode(std::string(40, 'a') + "cb"); }, {"tokenizer.json", "match limit", "42 bytes"});
  // A repeated group uses memory for each repetition: more than the compiled pattern's stack has, but within a limit.
  const Pattern turns(R"((?:\p{Lu}\p{Ll}|\p{Ll})+|\s+|\S)", "here");
  Pattern::Matcher matcher(turns);
  const std::string letters(1'000'000, 'a');
  for (const bool text_follows : {false, true}) {
    Pattern::Span span;
    CHECK(turns.find(matcher, letters, 0, text_follows, span) ==
          (text_follows ? Pattern::Found::cut : Pattern::Found::match));
    CHECK(span.begin == 0);
    CHECK(span.end == letters.size());
  }
}

TEST_CASE("tokenizers: 10 MB of mixed text give the tokens of the tokenizers library", "[tokenizers]") {
  if (std::system((python() + " -c 'import tokenizers' 2>/dev/null").c_str()) != 0)
    return void(test::skip("no tokenizers library for " + python() + " (TRIAD_PYTHON names another)"));
  const TemporaryFolder folder;
  REQUIRE(std::system((python() + " " TRIAD_SOURCE_DIR "/tests/io/make_tokens.py compare " + folder.path()).c_str()) ==
          0);
  const std::vector<std::string> documents = read_records(folder.file("documents"));
  size_t bytes = 0;
  for (const std::string& document : documents) bytes += document.size();
  REQUIRE(bytes >= 10'000'000);
  for (const char* name : {"gpt2", "llama3", "o200k", "flags", "deepseek", "splits"}) {
    INFO(name);
    const auto tokenizer = make_tokenizer(folder.file(std::string(name) + ".json"));
    const std::vector<std::string> ids = read_records(folder.file(std::string(name) + ".ids"));
    REQUIRE(ids.size() == documents.size());
    const auto start = std::chrono::steady_clock::now();
    size_t same = 0;
    std::vector<int32_t> tokens;
    for (size_t i = 0; i < documents.size(); ++i) {
      tokens.clear();
      tokenizer->append(documents[i], tokens);
      same += tokens.size() * sizeof(int32_t) == ids[i].size() &&
              std::memcmp(tokens.data(), ids[i].data(), ids[i].size()) == 0;
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%-8s %.1f MB/s\n", name, static_cast<double>(bytes) / 1e6 / seconds);
    CHECK(same == documents.size());
  }
}
