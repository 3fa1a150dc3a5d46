// Byte-level BPE: tokens equal Hugging Face's `tokenizers` library's, decoding restores any bytes, and an error names
// what is wrong in a file.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>

#include "io/file.h"
#include "io/json_config.h"
#include "io/tokenizer/bpe.h"
#include "io/tokenizer/bpe_tokenizer.h"
#include "io/tokenizer/pattern.h"
#include "io/tokenizer/unicode.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using triad::test::check_error;
using triad::test::TemporaryFolder;
using triad::test::write_text;

namespace {

std::vector<Json> known_cases() {
  const std::string path = TRIAD_SOURCE_DIR "/tests/io/known_tokens.json";
  const Json cases = parse_json(read_file(path), path);
  return {cases.begin(), cases.end()};
}

// Lets `change` modify a case's tokenizer.json, writes it, and reads it.
template <class F>
std::unique_ptr<Tokenizer> tokenizer_of(const TemporaryFolder& folder, const Json& known, F&& change,
                                        const TokenizerOptions& options = {}) {
  Json json = known.at("tokenizer");
  change(json);
  write_text(folder.file("tokenizer.json"), json.dump());
  return make_tokenizer(folder.file("tokenizer.json"), options);
}
std::unique_ptr<Tokenizer> tokenizer_of(const TemporaryFolder& folder, const Json& known) {
  return tokenizer_of(folder, known, [](Json&) {});
}

// Returns random text with words, spaces, whole and truncated UTF-8 characters, and arbitrary bytes.
std::string random_text(std::mt19937& random, size_t pieces) {
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
      const std::string text = i == 0 ? bytes : random_text(random, 1 + random() % 60);
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

TEST_CASE("tokenizers: the separator has a usual name or is named", "[tokenizers]") {
  const TemporaryFolder folder;
  const Json known = known_cases().front();
  static constexpr int32_t kUser = 900;
  const auto named = [](const std::string& first) {  // token 0, next to another special token
    return [first](Json& j) {
      j["model"]["vocab"].erase("<|endoftext|>");
      j["model"]["vocab"][first] = 0;
      j["added_tokens"][0]["content"] = first;
      j["added_tokens"].push_back({{"id", kUser}, {"content", "<|user_start|>"}, {"special", true}});
    };
  };
  CHECK(tokenizer_of(folder, known, named("<|bos|>"))->eot() == 0);
  CHECK(tokenizer_of(folder, known, named("<|bos|>"))->files().size() == 1);
  check_error([&] { tokenizer_of(folder, known, named("<|doc|>")); }, {"end-of-text", "--separator", "data.separator"});
  for (const auto& [separator, id] : {std::pair{"<|doc|>", 0}, {"<|user_start|>", kUser}}) {
    INFO(separator);
    const auto tokenizer = tokenizer_of(folder, known, named("<|doc|>"), {.separator = separator});
    CHECK(tokenizer->eot() == id);
    // Copied files are the same tokenizer, and another one does not read their separator.
    std::filesystem::create_directories(folder.file("copy"));
    write_tokenizer_files(tokenizer->files(), folder.file("copy"));
    const auto copy = make_tokenizer(folder.file("copy"));
    CHECK(copy->eot() == id);
    CHECK(copy->files() == tokenizer->files());
    CHECK(make_tokenizer(folder.file("copy"), {.separator = "<|user_start|>"})->eot() == kUser);
    write_tokenizer_files(tokenizer_of(folder, known)->files(), folder.file("copy"));
    CHECK(!std::filesystem::exists(folder.file("copy/separator.json")));
  }
  // The usual separator needs no file.
  const auto usual = [&](const std::string& separator) {
    return tokenizer_of(folder, known, named("<|bos|>"), {.separator = separator});
  };
  CHECK(usual("<|bos|>")->files() == usual("")->files());
  CHECK(usual("<|user_start|>")->files() != usual("")->files());
  check_error([&] { usual("<|none|>"); }, {"<|none|>", "no token"});
  CHECK_THROWS_AS(make_tokenizer("byte", {.separator = "<|bos|>"}), UsageError);
  write_text(folder.file("separator.json"), "[1]");
  check_error([&] { usual(""); }, {"separator.json", "[1]"});
}

TEST_CASE("tokenizers: shards, runs and checkpoints keep a separator that was named", "[tokenizers]") {
  const TemporaryFolder folder;
  static constexpr int kDocument = 700;
  std::string text;
  for (int i = 0; i < 300; ++i) text += fmt::format("Line {} of a text, it's all there is. ", i);
  write_text(folder.file("a.txt"), text);
  const auto tokenizer = tokenizer_of(folder, known_cases().front(), [](Json& j) {
    j["added_tokens"].push_back({{"id", kDocument}, {"content", "<|doc|>"}, {"special", true}});
  });
  const auto run = [&](const std::string& args, int code) {
    const test::Outcome outcome = test::run_program(args);
    INFO(args << "\n" << outcome.output);
    CHECK(outcome.exit_code == code);
    return outcome.output;
  };
  const std::string shards = folder.file("shards"), json = folder.file("tokenizer.json");
  run(fmt::format("data --tokenizer {} --separator '<|doc|>' --input {} --out {}", json, folder.file("a.txt"), shards),
      0);
  CHECK(parse_json(read_file(shards + "/manifest.json"), "manifest")["eot"] == kDocument);
  const std::string train = "train " TRIAD_SOURCE_DIR
                            "/configs/tiny.json --set train.steps=1 --set runtime.device=cpu --set train.eval_every=0 "
                            "--set model.vocab_size=1024 ";
  const auto out = [&](const std::string& name) { return "--set log.out_dir=" + folder.file(name) + " "; };
  const auto data = [&](const char* kind, const std::string& paths) {
    return fmt::format("--set data.kind={} --set 'data.paths=[\"{}\"]' ", kind, paths);
  };
  const std::string on_shards = train + data("shards", shards);
  run(on_shards + out("from_shards"), 0);
  run(train + data("text", folder.file("a.txt")) + "--set data.tokenizer=" + json + " --set 'data.separator=<|doc|>' " +
          out("from_text"),
      0);
  for (const std::string name : {"from_shards", "from_text"}) {
    INFO(name);
    CHECK(make_tokenizer(folder.file(name))->eot() == kDocument);
    CHECK(make_tokenizer(folder.file(name + "/checkpoints/step_1"))->eot() == kDocument);
    CHECK(parse_json(run("generate --json --device cpu --tokens 1 --prompt x --checkpoint " + folder.file(name), 0),
                     "generate")["tokens"]
              .size() <= 1);
  }
  CHECK(test::has(run(on_shards + "--set 'data.separator=<|endoftext|>' " + out("other"), 2), "<|endoftext|>"));
  CHECK(test::has(run(on_shards + "--set data.tokenizer=" + json + " " + out("other"), 2), "data.tokenizer"));
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

TEST_CASE("tokenizers: GPT-2's pair of files is the same tokenizer", "[tokenizers]") {
  const TemporaryFolder folder;
  const Json known = known_cases().front();
  REQUIRE(known["name"] == "gpt2");
  const auto whole = tokenizer_of(folder, known);
  std::filesystem::create_directory(folder.file("pair"));
  write_text(folder.file("pair/encoder.json"), known["tokenizer"]["model"]["vocab"].dump());
  std::string merges = "#version: 0.2\n";
  for (const Json& merge : known["tokenizer"]["model"]["merges"])
    merges += merge.is_string() ? merge.get<std::string>() + "\n"
                                : merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\n";
  write_text(folder.file("pair/vocab.bpe"), merges);
  for (const char* name : {"pair", "pair/encoder.json", "pair/vocab.bpe"}) {
    const auto pair = make_tokenizer(folder.file(name));
    CHECK(pair->vocab_size() == whole->vocab_size());
    CHECK(pair->eot() == whole->eot());
    for (const Json& text : known["texts"])
      CHECK(pair->encode(text.get<std::string>()) == whole->encode(text.get<std::string>()));
  }
  // The files that a checkpoint contains suffice to restore the tokenizer.
  std::filesystem::create_directory(folder.file("checkpoint"));
  write_tokenizer_files(make_tokenizer(folder.file("pair"))->files(), folder.file("checkpoint"));
  CHECK(tokenizer_of_checkpoint(folder.file("checkpoint"), "gone")->encode("some text") == whole->encode("some text"));
  std::filesystem::create_directory(folder.file("empty"));
  CHECK_THROWS_AS(tokenizer_of_checkpoint(folder.file("empty"), folder.file("gone")), UsageError);
  CHECK(tokenizer_of_checkpoint(folder.file("checkpoint"), "byte")->name() == "byte");
  write_text(folder.file("pair/vocab.bpe"), merges + "a b c\n");
  check_error([&] { make_tokenizer(folder.file("pair")); }, {"vocab.bpe", "a b c", "line"});
  write_text(folder.file("pair/vocab.bpe"), "zzzz yyyy\n");
  check_error([&] { make_tokenizer(folder.file("pair")); }, {"vocab.bpe", "zzzz", "not in the vocabulary"});
}

TEST_CASE("tokenizers: invalid and unsupported files are refused", "[tokenizers]") {
  const TemporaryFolder folder;
  const Json known = known_cases().front();
  struct Case {
    const char* name;
    std::function<void(Json&)> change;
    std::vector<std::string> words;
  };
  const Json split = {{"type", "Split"}, {"pattern", {{"Regex", "a(b"}}}, {"behavior", "Isolated"}, {"invert", false}};
  const auto pattern = [&](const std::string& regex) {
    return [regex, split](Json& j) {
      Json changed = split;
      changed["pattern"]["Regex"] = regex;
      j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {changed, j["pre_tokenizer"]}}};
    };
  };
  const Case cases[] = {
      {"no model", [](Json& j) { j.erase("model"); }, {"model"}},
      {"other model", [](Json& j) { j["model"]["type"] = "Unigram"; }, {"model.type", "Unigram", "BPE"}},
      {"no vocabulary", [](Json& j) { j["model"].erase("vocab"); }, {"model.vocab"}},
      {"vocabulary is a list", [](Json& j) { j["model"]["vocab"] = {1}; }, {"model.vocab", "object"}},
      {"number twice", [](Json& j) { j["model"]["vocab"]["zz!"] = 5; }, {"number 5", "zz!"}},
      {"negative number", [](Json& j) { j["model"]["vocab"]["zz!"] = -5; }, {"model.vocab", "-5"}},
      {"wild number", [](Json& j) { j["model"]["vocab"]["zz!"] = 1e15; }, {"model.vocab"}},
      {"number past every vocabulary",
       [](Json& j) { j["model"]["vocab"]["zz!"] = 1 << 21; },
       {"model.vocab", "2097152"}},
      {"a byte without token",
       [](Json& j) {
         j["model"]["vocab"].erase("A");
         j["model"]["merges"] = Json::array();
       },
       {"0x41", "initial_alphabet"}},
      {"merge of unknown tokens", [](Json& j) { j["model"]["merges"].push_back("q zz!"); }, {"model.merges[", "zz!"}},
      {"merge of three", [](Json& j) { j["model"]["merges"].push_back("a b c"); }, {"model.merges[", "a b c"}},
      {"merge is a number", [](Json& j) { j["model"]["merges"].push_back(7); }, {"model.merges[", "7", "list"}},
      {"dropout", [](Json& j) { j["model"]["dropout"] = 0.1; }, {"model.dropout", "0.1"}},
      {"suffix", [](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }, {"end_of_word_suffix", "</w>"}},
      {"byte fallback of a byte without token",
       [](Json& j) {
         j["model"]["byte_fallback"] = true;
         j["model"]["vocab"].erase("A");
         j["model"]["merges"] = Json::array();
       },
       {"model.byte_fallback is true", "0x41"}},
      {"normalizer",
       [](Json& j) {
         j["normalizer"] = {{"type", "Lowercase"}};
       },
       {"normalizer.type", "Lowercase", "NFC"}},
      {"no pre-tokenizer", [](Json& j) { j["pre_tokenizer"] = nullptr; }, {"pre_tokenizer", "ByteLevel"}},
      {"pre-tokenizer",
       [](Json& j) {
         j["pre_tokenizer"] = {{"type", "Metaspace"}};
       },
       {"pre_tokenizer.type", "Metaspace"}},
      {"ByteLevel not last",
       [](Json& j) {
         j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {j["pre_tokenizer"], j["pre_tokenizer"]}}};
       },
       {"pretokenizers[1]", "last"}},
      {"decoder",
       [](Json& j) {
         j["decoder"] = {{"type", "WordPiece"}};
       },
       {"decoder.type", "WordPiece"}},
      {"added token's number", [](Json& j) { j["added_tokens"][0]["id"] = 3; }, {"added_tokens[0]", "token 0"}},
      {"added token twice",
       [](Json& j) { j["added_tokens"].push_back(j["added_tokens"][0]); },
       {"added_tokens[1]", "before"}},
      {"added token that spells a byte",  // byte 0xe9 is \u00e9 in GPT-2's alphabet
       [](Json& j) {
         j["added_tokens"].push_back({{"content", "\u00e9"}, {"id", j["model"]["vocab"]["\u00e9"]}});
       },
       {"added_tokens[1]", "other bytes", "id of its own"}},
      {"no end of text", [](Json& j) { j["added_tokens"] = Json::array(); }, {"precedes each document"}},
      {"pattern that is none", pattern("a(b"), {"a(b", "cannot be compiled"}},
      {"pattern with lines", pattern("^a"), {"^a", "offset 0"}},
      {"pattern with \\w", pattern(R"(x\w)"), {R"(\w)", "offset 1"}},
      {"pattern with a class in a class", pattern("[a[b]]"), {"[a[b]]", "class"}},
      {"pattern with a cut class", pattern("[ab"), {"[ab", "closed"}},
      {"pattern with a script", pattern(R"(\p{Greek})"), {R"(\p{Greek})"}},
      {"pattern without a lower bound", pattern("a{,3}"), {"a{,3}", "{,"}},
      {"pattern with n or none", pattern("a{3}?"), {"a{3}?", "}?"}},
      {"pattern with a late flag", pattern("a(?i)b"), {"a(?i)b", "group"}},
      {"pattern with a name", pattern("(?<n>a)"), {"(?<n>a)", "group"}},
      {"pattern with a ) alone", pattern("a)"), {"a)", "without its ("}},
      {"empty match", pattern("a*"), {"a*", "empty text"}},
      {"empty match of a branch", pattern("ab|(?=c)"), {"ab|(?=c)", "empty text"}},
      {"empty match of a string",
       [split](Json& j) {
         Json changed = split;
         changed["pattern"] = {{"String", ""}};
         j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {changed, j["pre_tokenizer"]}}};
       },
       {"empty text"}},
      {"ss in any case", pattern("(?i:ss)"), {"(?i:ss)", "U+0073 and U+0073", "offset 5"}},
      {"ss in any case, by a group", pattern("(?i)s(?:s|t)"), {"U+0073 and U+0073"}},
      {"ss in any case, by a repetition", pattern("(?i:s{1}s)"), {"U+0073 and U+0073"}},
      {"ss in any case, by codes", pattern(R"((?i:\x53\u017f))"), {"U+0073 and U+0073"}},
      {"a ligature's letters", pattern("x|(?i:(a|f)i)"), {"U+0066 and U+0069"}},
      {"sharp s", pattern("(?i:\xc3\x9f)"), {"U+00DF", "several characters"}},
      {"sharp s in a class", pattern("(?i:[\xc3\x80-\xc3\xbf])"), {"U+00DF", "several characters"}},
      {"capital I with a dot", pattern("(?i:\xc4\xb0)"), {"U+0130", "several characters"}},
      {"a ligature by its code", pattern(R"((?i:\x{fb01}))"), {"U+FB01", "several characters"}},
      {"a new letter in any case", pattern(R"((?i:\x{1c8a}))"), {"U+1C8A", "older versions"}},
      {"a letter with a new capital", pattern(R"((?i:[\x{264}]))"), {"U+0264", "older versions"}},
      {"capitals in any case", pattern(R"((?i:a\p{Lu}))"), {R"(\p{Lu} in (?i))"}},
      {"marks in any case", pattern(R"((?i:[\p{M}]))"), {R"(\p{M} in (?i))"}},
  };
  for (const Case& c : cases) {
    INFO(c.name);
    std::vector<std::string> words = c.words;
    if (words[0] != "precedes each document") words.push_back("tokenizer.json");
    check_error([&] { tokenizer_of(folder, known, c.change); }, words);
  }
  write_text(folder.file("tokenizer.json"), known["tokenizer"].dump().substr(0, 5000));
  check_error([&] { make_tokenizer(folder.file("tokenizer.json")); }, {"tokenizer.json", "parse"});
  constexpr size_t kDeep = 1 << 20;
  write_text(folder.file("tokenizer.json"), R"({"model": )" + std::string(kDeep, '[') + std::string(kDeep, ']') + "}");
  check_error([&] { make_tokenizer(folder.file("tokenizer.json")); }, {"tokenizer.json", "nested", "64"});
  write_text(folder.file("tokenizer.json"), "[]");
  check_error([&] { make_tokenizer(folder.path()); }, {"tokenizer.json", "model"});
  CHECK_THROWS_AS(make_tokenizer(folder.file("none.json")), UsageError);
  const auto tokenizer = tokenizer_of(folder, known);
  check_error([&] { tokenizer->decode(std::vector<int32_t>{1, 99999}); }, {"99999", "position 1"});
  check_error([&] { tokenizer->decode(std::vector<int32_t>{-1}); }, {"-1"});
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

TEST_CASE("tokenizers: a damaged file gives an Error or a tokenizer, and never a crash", "[tokenizers]") {
  const TemporaryFolder folder;
  std::mt19937 random(9);
  const std::vector<Json> cases = known_cases();
  const std::string texts[] = {cases[0]["tokenizer"].dump(), cases[3]["tokenizer"].dump(),
                               cases[5]["tokenizer"].dump()};
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    std::string text = texts[i % 3];
    for (uint32_t n = 1 + random() % 3; n > 0; --n) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, random() % 40);
          break;
        case 2:
          text.insert(at, text.substr(random() % text.size(), random() % 40));
          break;
        default:
          text[at] = "[]{},:\"0-e\\"[random() % 11];
      }
    }
    write_text(folder.file("tokenizer.json"), text);
    try {
      const auto tokenizer = make_tokenizer(folder.file("tokenizer.json"));
      tokenizer->encode("some text, it's 123 \xe4\xb8\xad");
    } catch (const Error& e) {
      ++refused;
      CHECK(std::string(e.what()).find("tokenizer.json") != std::string::npos);
    }
  }
  CHECK(refused > 200);
}

TEST_CASE("tokenizers: a checkpoint holds its tokenizer, which generate and eval use", "[tokenizers]") {
  const TemporaryFolder folder;
  const Json known = known_cases().front();
  const auto tokenizer = tokenizer_of(folder, known);
  std::string text;
  for (int i = 0; i < 300; ++i) text += fmt::format("Line {} of a text, it's all there is. ", i);
  write_text(folder.file("a.txt"), text);
  const std::string sets = fmt::format(
      "train {} --set data.kind=text --set 'data.paths=[\"{}\"]' --set data.tokenizer={} --set train.steps=2 --set "
      "train.save_every=1 --set runtime.device=cpu --set log.out_dir={} --set train.eval_every=0 --set "
      "model.vocab_size=",
      TRIAD_SOURCE_DIR "/configs/tiny.json", folder.file("a.txt"), folder.file("tokenizer.json"), folder.file("run"));
  const test::Outcome small = test::run_program(sets + "256");
  CHECK(small.exit_code == 2);
  CHECK(small.output.find("model.vocab_size") != std::string::npos);
  const test::Outcome trained = test::run_program(sets + "512");
  INFO(trained.output);
  REQUIRE(trained.exit_code == 0);
  const std::string whole = read_file(folder.file("tokenizer.json"));
  CHECK(read_file(folder.file("run/checkpoints/step_2/tokenizer.json")) == whole);
  CHECK(read_file(folder.file("run/tokenizer.json")) == whole);
  std::filesystem::remove(folder.file("tokenizer.json"));
  for (const std::string from : {"run", "run/checkpoints/step_1"}) {
    const test::Outcome generated =
        test::run_program("generate --device cpu --tokens 3 --prompt \"It's\" --checkpoint " + folder.file(from));
    INFO(generated.output);
    CHECK(generated.exit_code == 0);
    CHECK(generated.standard_output.starts_with("It's"));
    const test::Outcome evaluated = test::run_program("eval --json --device cpu --checkpoint " + folder.file(from) +
                                                      " --data " + folder.file("a.txt"));
    INFO(evaluated.output);
    REQUIRE(evaluated.exit_code == 0);
    const Json result = Json::parse(evaluated.standard_output);
    CHECK(result["positions"] == static_cast<int64_t>(tokenizer->encode(text).size()));
    const double bits = result["loss"].get<double>() * result["positions"].get<double>() / std::log(2.0);
    CHECK(result["bits_per_byte"].get<double>() == Approx(bits / static_cast<double>(text.size())));
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
