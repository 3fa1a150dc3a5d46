// Tokenizer files: which are read, what a checkpoint holds of them, and an error that names what is wrong in one.
#include <cmath>
#include <filesystem>
#include <functional>
#include <random>

#include "io/file.h"
#include "io/json_config.h"
#include "io/tokenizer/bpe_tokenizer.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/tokenizer_cases.h"

using namespace triad;
using triad::test::check_error;
using triad::test::known_cases;
using triad::test::TemporaryFolder;
using triad::test::tokenizer_of;
using triad::test::write_text;

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
