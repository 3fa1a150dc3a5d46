// triad score, compared with triad eval (equal losses) and triad generate (equal most likely tokens); eval --batches;
// generate's prompt sources; weights given by their file; folders of shards.
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "io/json_config.h"
#include "io/tokenizer/tokenizer.h"
#include "tests/support/huggingface_folder.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using namespace triad::test;

namespace {

Outcome succeed(const std::string& args) {
  const Outcome outcome = run_program(args);
  INFO(args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return outcome;
}

std::vector<Json> json_lines(const std::string& text) {
  std::vector<Json> all;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) all.push_back(parse_json(line, "a line"));
  return all;
}

// A model that is trained for a few steps on plain text, so that its most likely tokens are letters, without ties.
struct Trained {
  TemporaryFolder folder;
  std::string from = " --device cpu --checkpoint " + folder.file("run") + " ";
  Trained() {
    std::string text;
    for (int i = 0; i < 100; ++i) text += fmt::format("{} sheep and {} goats; ", i * i, i);
    write_text(folder.file("corpus"), text);
    succeed("train " + kTiny + " --set runtime.device=cpu --set data.kind=text --set 'data.paths=[\"" +
            folder.file("corpus") +
            "\"]' --set train.lr=0.01 --set train.steps=40 --set log.out_dir=" + folder.file("run"));
  }

  std::vector<Json> score(const std::vector<std::pair<std::string, std::string>>& pairs, const std::string& more = "") {
    std::string lines;
    for (const auto& [context, continuation] : pairs)
      lines += Json({{"context", context}, {"continuation", continuation}}).dump() + "\n";
    write_text(folder.file("requests.jsonl"), lines);
    return json_lines(
        succeed("score" + from + "--jsonl " + folder.file("requests.jsonl") + " " + more).standard_output);
  }
};

}  // namespace

TEST_CASE("score: log-probabilities over a text sum to eval's loss, for any windows and batches", "[score]") {
  Trained t;
  std::string text;
  for (int i = 0; i < 29; ++i) text += fmt::format("{} sheep; ", i * i);
  write_text(t.folder.file("text"), text);
  // Rows with 48 tokens (the config's), fewer, and more than the text has.
  for (const char* seq : {"", "--seq 7 ", "--seq 1000 "}) {
    INFO(seq);
    const Json evaluated =
        parse_json(succeed("eval --json" + t.from + seq + "--data " + t.folder.file("text")).standard_output, "eval");
    const Json scored = t.score({{"", text}}, seq).at(0);
    CHECK(scored["tokens"] == text.size());
    CHECK(evaluated["positions"] == text.size());
    const double loss = -scored["logprob"].get<double>() / static_cast<double>(text.size());
    CHECK(loss == Approx(evaluated["loss"].get<double>()).epsilon(1e-6));
  }
  // By the chain rule consecutive parts' log-probabilities sum to the whole text's. Requests may be in any batch and
  // order.
  const std::string whole = text.substr(0, 40);
  std::vector<std::pair<std::string, std::string>> parts = {{"", whole}};
  for (size_t at = 0; at < whole.size(); at += 8) parts.emplace_back(whole.substr(0, at), whole.substr(at, 8));
  for (const char* batch : {"--batch 1", "--batch 4", "--batch 100"}) {
    const std::vector<Json> scored = t.score(parts, batch);
    REQUIRE(scored.size() == parts.size());
    double sum = 0;
    for (size_t i = 1; i < scored.size(); ++i) sum += scored[i]["logprob"].get<double>();
    CHECK(sum == Approx(scored[0]["logprob"].get<double>()).epsilon(1e-5));
  }
}

TEST_CASE("score: a request has the same result alone and packed with others, and equal requests equal ones",
          "[score]") {
  Trained t;
  std::vector<std::pair<std::string, std::string>> requests;
  for (int i = 0; i < 24; ++i)
    requests.emplace_back(std::string(static_cast<size_t>(i * i % 45), static_cast<char>('a' + i % 3)) + " sheep",
                          i % 4 == 0 ? std::string(1, 'x') : fmt::format(" and {} goats", i));
  requests.emplace_back("", std::string(100, 'y'));  // several windows
  for (const char* choice : {"A", "B", "C", "\n", "AB"}) requests.emplace_back("1 sheep, B goats. Answer:", choice);
  requests.push_back(requests[5]);
  const std::vector<Json> packed = t.score(requests), narrow = t.score(requests, "--batch 1");
  REQUIRE(packed.size() == requests.size());
  CHECK(packed.back() == packed[5]);
  CHECK(narrow.back() == narrow[5]);
  for (size_t i = 0; i < requests.size(); i += i < 21 ? 3 : 1) {
    const Json alone = t.score({requests[i]}).at(0);
    for (const Json& among : {packed[i], narrow[i]}) {
      INFO(i << ": " << among.dump() << ", alone " << alone.dump());
      CHECK(among["logprob"].get<double>() == Approx(alone["logprob"].get<double>()).epsilon(1e-5));
      CHECK(among["tokens"] == alone["tokens"]);
      CHECK(among["greedy"] == alone["greedy"]);
    }
  }
}

TEST_CASE("score: white space at the end of a context is scored, and a long context is cut at its start", "[score]") {
  Trained t;
  const std::vector<Json> spaces = t.score({{"one ", "two"}, {"one", " two"}, {" ", "x"}, {"", " x"}});
  CHECK(spaces[0] == spaces[1]);
  CHECK(spaces[0]["tokens"] == 4);
  CHECK(spaces[2] == spaces[3]);
  // White space is what Python's str.rstrip() removes.
  for (const std::string space : {"\x0b", "\x1c", "\xc2\x85", "\xc2\xa0", "\xe2\x80\xa8", "\xe3\x80\x80"})
    CHECK(t.score({{"one" + space, "two"}}).at(0)["tokens"] == space.size() + 3);
  CHECK(t.score({{"one\xe2\x80\x8b", "two"}}).at(0)["tokens"] == 3);  // not a zero-width space
  // In a row of 48 the last 4 predictions are the continuation's, so only the last 45 context tokens count.
  const std::string same(45, 'c');
  const std::vector<Json> truncated = t.score({{"aaaaaaaaaaaaaaaa" + same, "tail"}, {"bbbbb" + same, "tail"}});
  CHECK(truncated[0] == truncated[1]);
  CHECK(t.score({{"a" + same.substr(1), "tail"}}).at(0) != truncated[0]);
}

TEST_CASE("score: the greedy continuation is that of generate at temperature 0", "[score]") {
  Trained t;
  const Json generated = parse_json(
      succeed("generate --json --temperature 0 --tokens 6" + t.from + "--prompt 'Once upon'").standard_output,
      "generate");
  CHECK(generated["prompt"] == "Once upon");
  REQUIRE(generated["tokens"].size() == 6);
  CHECK(generated["stopped"] == false);
  const std::string greedy = generated["text"];
  REQUIRE(greedy.size() == 6);
  std::string late = greedy;  // the last token differs from generate's
  late.back() = late.back() == 'q' ? 'p' : 'q';
  const std::vector<Json> scored = t.score({{"Once upon", greedy}, {"Once upon", late}, {"Once upon" + greedy, "q"}});
  CHECK(scored[0]["greedy"] == true);
  CHECK(scored[1]["greedy"] == false);
  CHECK(scored[0]["logprob"].get<double>() > scored[1]["logprob"].get<double>());
  // A last token that is the most likely one, after one that is not; another request shares the window.
  const std::string wrong = greedy[0] == 'q' ? "p" : "q";
  const std::string next =
      parse_json(succeed("generate --json --temperature 0 --tokens 1" + t.from + "--prompt 'Once upon" + wrong + "'")
                     .standard_output,
                 "generate")["text"];
  const std::vector<Json> shared =
      t.score({{"Once upon", wrong + next}, {"Once upon", wrong + "~"}, {"Once upon" + wrong, next}});
  CHECK(shared[0]["greedy"] == false);
  CHECK(shared[1]["greedy"] == false);
  CHECK(shared[2]["greedy"] == true);
}

TEST_CASE("score: standard input and output, files, and malformed lines", "[score]") {
  Trained t;
  write_text(t.folder.file("good"), R"({"context": "a", "continuation": "b", "id": 7})"
                                    "\n"
                                    R"({"context": "", "continuation": "c"})");
  const std::string score = "score" + t.from + "--jsonl ";
  const Outcome piped = run_command("cat " + t.folder.file("good") + " | " TRIAD_PROGRAM " " + score + "-");
  INFO(piped.output);
  REQUIRE(piped.exit_code == 0);
  CHECK(json_lines(piped.standard_output).size() == 2);
  const Outcome full = run_command(TRIAD_PROGRAM " " + score + t.folder.file("good") + " > /dev/full");
  CHECK(full.exit_code == 1);
  CHECK(has(full.output, "standard output cannot be written: No space left on device"));
  CHECK(succeed(score + t.folder.file("good") + " --out " + t.folder.file("out")).output.empty());
  CHECK(read_text(t.folder.file("out")) == piped.standard_output);
  // A line that is no request has an error in its place, and the others have their results.
  const auto refused = [&](const std::string& line, const std::string& words) {
    const std::string first = R"({"context": "a", "continuation": "b"})",
                      third = R"({"context":"","continuation":"c"})";
    write_text(t.folder.file("bad"), first + "\n" + line + "\n" + third + "\n");
    for (const char* batch : {"1", "8"}) {
      const Outcome outcome =
          run_program(score + t.folder.file("bad") + " --batch " + batch + " --out " + t.folder.file("results"));
      INFO(line << "\n" << outcome.output);
      CHECK(outcome.exit_code == 1);
      CHECK(has(outcome.output, "1 of 3 requests could not be scored"));
      CHECK(has(outcome.output, "bad line 2: "));
      const std::string results = read_text(t.folder.file("results"));
      const std::vector<Json> lines = json_lines(results), good = json_lines(piped.standard_output);
      REQUIRE(lines.size() == 3);
      CHECK(lines[0] == good[0]);
      CHECK(has(lines[1]["error"].get<std::string>(), "bad line 2: "));
      CHECK(has(lines[1]["error"].get<std::string>(), words));
      CHECK(lines[2] == good[1]);
      CHECK(run_command(TRIAD_PROGRAM " " + score + t.folder.file("bad") + " 2>/dev/null").standard_output == results);
    }
  };
  refused("{\"context\": \"a\"", "no JSON");
  refused("[1]", "context");
  refused(R"({"context": "a"})", "\"continuation\"");
  refused("\xff", "no JSON");
  refused(R"({"context": 3, "continuation": "b"})", "\"context\"");
  refused(R"({"context": "a", "continuation": ""})", "is empty");
  write_text(t.folder.file("bad"), "x\n");
  const Outcome none = run_command(TRIAD_PROGRAM " " + score + t.folder.file("bad") + " 2>/dev/null");
  CHECK(none.exit_code == 1);
  CHECK(json_lines(none.standard_output).size() == 1);
  write_text(t.folder.file("bad"), "");
  CHECK(run_program(score + t.folder.file("bad")).exit_code == 1);
  write_text(t.folder.file("bad"),
             "[\n"
             R"({"context": "a", "continuation": "b"})"
             "\n]");
  CHECK(has(run_program(score + t.folder.file("bad")).output, "JSON array"));
  // So also if the first line is one that the whole file could be known by.
  for (const std::string first :
       {"[1, NaN]", R"([{"context": "a", "continuation": "b"}])", "[", "[\"cut", "[{\"cut\": 1},", "{", "{\"cut", "7",
        "\"one\"", "null", "# a comment", "{\n\"context\": \"a\",\n\"continuation\": \"b\"\n}"}) {
    write_text(t.folder.file("first"), first + "\n" + read_text(t.folder.file("good")) + "\n");
    for (const std::string& from : {t.folder.file("first"), "- < " + t.folder.file("first")}) {
      const Outcome outcome = run_command(TRIAD_PROGRAM " " + score + from + " 2>/dev/null");
      INFO(from << " " << first << "\n" << outcome.standard_output);
      CHECK(outcome.exit_code == 1);
      const std::vector<Json> lines = json_lines(outcome.standard_output);
      REQUIRE(lines.size() >= 3);
      CHECK(has(lines[0].value("error", ""), " line 1: "));
      CHECK(lines[lines.size() - 2] == json_lines(piped.standard_output)[0]);
      CHECK(lines.back() == json_lines(piped.standard_output)[1]);
    }
  }
  // Whitespace lines are no requests, and a character that ends a line elsewhere is none within a text.
  write_text(t.folder.file("blank"),
             "\xef\xbb\xbf\n\u00a0\n"
             R"({"context": "a", "continuation": "b"})"
             "\r\n\u2028\r\n"
             R"({"context": "", "continuation": "c"})"
             "\n\n");
  CHECK(succeed(score + t.folder.file("blank")).standard_output == piped.standard_output);
}

TEST_CASE("score: a continuation that joins the context's last token is encoded alone", "[score]") {
  const TemporaryFolder folder;
  const Json file = parse_json(bpe_tokenizer_json(), "tokenizer");
  write_text(folder.file("tokenizer.json"), file.dump());
  const std::string checkpoint = folder.file("checkpoint");
  succeed("init " + kTiny + " --set model.vocab_size=512 --set data.tokenizer=" + folder.file("tokenizer.json") +
          " --out " + checkpoint);
  // Two halves of a token made of letters.
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(folder.file("tokenizer.json"));
  std::string word;
  for (const auto& [token, id] : file["model"]["vocab"].items())
    if (token.size() >= 2 && token.find_first_not_of("abcdefghijklmnopqrstuvwxyz") == std::string::npos &&
        tokenizer->encode(token).size() == 1)
      word = token;
  REQUIRE(word.size() >= 2);
  const std::string begin = word.substr(0, 1), end = word.substr(1);
  write_text(folder.file("requests"), Json({{"context", begin}, {"continuation", end}}).dump() + "\n" +
                                          Json({{"context", "x"}, {"continuation", " y"}}).dump() + "\n");
  const std::vector<Json> scored = json_lines(
      succeed("score --device cpu --checkpoint " + checkpoint + " --jsonl " + folder.file("requests")).standard_output);
  REQUIRE(scored.size() == 2);
  CHECK(scored[0]["tokens"] == tokenizer->encode(end).size());
  CHECK(scored[0]["logprob"].get<double>() < 0);
}

TEST_CASE("score: the adapter to lm-evaluation-harness", "[score]") {
  if (std::system("python3 -c '' 2>/dev/null") != 0) return void(skip("no python3"));
  Trained t;
  const std::string api = t.folder.file("lm_eval/api");
  std::filesystem::create_directories(api);
  write_text(t.folder.file("lm_eval/__init__.py"), "");
  write_text(api + "/__init__.py", "");
  write_text(api + "/model.py", "class LM:\n    pass\n");
  write_text(api + "/registry.py", "def register_model(name):\n    return lambda made: made\n");
  // Characters at which str.splitlines() splits, and which JSON writes as they are.
  write_text(t.folder.file("test.py"), R"(
import sys
import lm_eval_triad
model = lm_eval_triad.TriadLM(sys.argv[1], program=sys.argv[2], device="cpu")
class Request:
    def __init__(self, *args):
        self.args = args
texts = ["plain", "a\u2028b", "a\u2029b", "a\u0085b", "a\x1cb", "a\r\nb", "a\n", 60 * "long", ""]
whole = {"max_gen_toks": 9, "temperature": 0.0}
made = model.generate_until([Request(text, whole) for text in texts])
for text, continuation in zip(texts, made):
    alone, = model.run("generate", "--json", "--prompt", text, "--tokens", "9", "--temperature", "0")
    assert alone["text"] == continuation, (ascii(text), alone, continuation)
first = made[0]
for until in (first[3:5], [first[4], "", first[2:5]]):
    stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
    cut = min(first.find(stop) for stop in stops)
    assert model.generate_until([Request("plain", {**whole, "until": until})]) == [first[:cut]], (first, until)
assert model.generate_until([]) == []
pairs = [("a\u2028", "b"), ("x", ""), ("a\u00a0", "\u2029c"), ("a", "\u00a0\u2029c")]
scores = model.score(pairs)
assert len(scores) == 4 and scores[1] == (0.0, True), scores
assert scores[2] == scores[3], scores
try:
    model.run("score", "--jsonl", "-", text='{"context": "a"}\n')
    sys.exit("an error was not raised")
except ValueError as error:
    assert "continuation" in str(error), error
print("fine")
)");
  const Outcome outcome =
      run_command("PYTHONPATH=" + t.folder.path() + ":" TRIAD_SOURCE_DIR "/tools/huggingface python3 -B " +
                  t.folder.file("test.py") + " " + t.folder.file("run") + " " TRIAD_PROGRAM);
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(has(outcome.output, "fine"));
}

TEST_CASE("eval: --batches N evaluates the first N batches", "[score]") {
  Trained t;
  std::string text;
  for (int i = 0; i < 200; ++i) text += fmt::format("{} ", i * i * i);
  write_text(t.folder.file("text"), text);
  write_text(t.folder.file("head"), text.substr(0, 2 * 3 * 20));
  const auto judge = [&](const std::string& more) {
    return parse_json(succeed("eval --json --batch 3 --seq 20" + t.from + more).standard_output, "eval");
  };
  const Json first = judge("--batches 2 --data " + t.folder.file("text")),
             head = judge("--data " + t.folder.file("head"));
  for (const char* key : {"loss", "ppl", "bits_per_byte", "positions"}) CHECK(first[key] == head[key]);
  CHECK(first["tokens_per_s"].get<double>() > 0);
  CHECK(judge("--batches 1000 --data " + t.folder.file("text"))["positions"] == text.size());
}

TEST_CASE("generate: prompts from files and standard input, weights by their file", "[score]") {
  Trained t;
  const std::string generate = "generate --json --temperature 0 --tokens 4 --checkpoint ", run = t.folder.file("run"),
                    cpu = " --device cpu ";
  write_text(t.folder.file("a"), "two\nlines\n");
  const std::string generated = succeed(generate + run + cpu + "--prompt 'two\nlines'").standard_output;
  CHECK(succeed(generate + run + cpu + "--prompt-file " + t.folder.file("a")).standard_output == generated);
  CHECK(
      run_command("printf 'two\\nlines' | " TRIAD_PROGRAM " " + generate + run + cpu + "--prompt -").standard_output ==
      generated);
  CHECK(succeed(generate + run + "/model.safetensors" + cpu + "--prompt 'two\nlines'").standard_output == generated);
  CHECK(json_lines(succeed(generate + run + cpu + "--prompt b --prompt-file " + t.folder.file("a")).standard_output)
            .at(1) == parse_json(generated, "generate"));
  CHECK(run_program(generate + run + cpu).exit_code == 2);
  // A weights file needs a config in its folder.
  std::filesystem::create_directory(t.folder.file("alone"));
  std::filesystem::copy(run + "/model.safetensors", t.folder.file("alone"));
  const Outcome alone = run_program(generate + t.folder.file("alone/model.safetensors") + cpu + "--prompt x");
  CHECK(alone.exit_code == 1);
  CHECK(has(alone.output, "neither state.json nor config.json beside it"));
}

TEST_CASE("inspect: a folder of shards, with its manifest and without", "[score]") {
  const TemporaryFolder folder;
  for (const char* name : {"a", "b", "c"}) write_text(folder.file(name) + ".txt", std::string(100, *name));
  const std::string out = folder.file("shards");
  succeed("data --input '" + folder.file("*.txt") + "' --out " + out + " --shard-tokens 64");
  const Outcome whole = succeed("inspect " + out);
  INFO(whole.output);
  for (const char* text : {"tokenizer: \"byte\"", "vocab_size: 256", "train: 2 documents, 202 tokens, 4 shards",
                           "val: 1 document, 101 tokens, 2 shards", "train_000000.bin", "6 shards, 303 tokens"})
    CHECK(has(whole.output, text));
  std::filesystem::remove(out + "/manifest.json");
  CHECK(has(succeed("inspect " + out).output, "6 shards, 303 tokens"));
  std::filesystem::resize_file(out + "/train_000001.bin", 1100);
  const Outcome incomplete = run_program("inspect " + out);
  CHECK(incomplete.exit_code == 1);
  CHECK(has(incomplete.output, "train_000001.bin"));
}
