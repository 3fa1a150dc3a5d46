// `triad tokenizer train`: the same tokenizer from any form of the text, which the other verbs take; bad input.
#include <filesystem>

#include "io/file.h"
#include "io/json_config.h"
#include "tests/support/corpus.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace fs = std::filesystem;

namespace {

// Runs `triad tokenizer train ARGS` into the folder, and returns its files.
std::map<std::string, std::string> trained(const std::string& args, const std::string& out) {
  const Outcome outcome = run_program("tokenizer train " + args + " --out " + out);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return files_of(out);
}

// Text of one document, longer than a pipeline piece.
std::string long_text() {
  std::string text;
  for (int i = 0; text.size() < 2'500'000; ++i)
    text += fmt::format("Line {} says don't {}\n\n", i * 7919 % 10'007, i % 3 == 0 ? "\u4e2d\u6587\u3002" : "twice ");
  return text;
}

}  // namespace

TEST_CASE("tokenizer train: compression, pipes, records and threads do not change the tokenizer", "[data]") {
  const TemporaryFolder folder;
  const std::string text = long_text();
  write_text(folder.file("a.txt"), text);
  write_text(folder.file("a.jsonl"), Json{{"text", text}}.dump() + "\n");
  write_text(folder.file("a.txt.gz"), gzip(text, 3));
  write_text(folder.file("a.txt.zst"), zstd(text));
  const std::string sizes = " --vocab-size 700 --split gpt2";
  const auto first = trained("--input " + folder.file("a.txt") + sizes + " --threads 1", folder.file("first"));
  REQUIRE(first.size() == 3);
  const Json json = parse_json(first.at("tokenizer.json"), "tokenizer.json");
  CHECK(json["model"]["vocab"].size() == 700);
  CHECK(json["model"]["merges"].size() == 700 - 257);
  const std::string forms[] = {"a.txt --threads 5",
                               "a.jsonl",
                               "a.txt.gz",
                               "a.txt.zst --threads 2",
                               "- < " + folder.file("a.txt"),
                               "- < " + folder.file("a.txt.zst")};
  for (const std::string& form : forms) {
    INFO(form);
    const std::string input = form.starts_with("-") ? form : folder.file(form);
    // The redirection may stand before options.
    CHECK(trained("--input " + input + sizes, folder.file("out")) == first);
    fs::remove_all(folder.file("out"));
  }
}

TEST_CASE("tokenizer train: data, a run and an export take the tokenizer", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.jsonl"), jsonl(300, 2));
  for (const std::string split : {"gpt2", "gpt4", "qwen"})
    trained(
        "--vocab-size 400 --split " + split + " --special '<|endoftext|>' '<|user|>' --input " + folder.file("a.jsonl"),
        folder.file(split));
  const std::string tokenizer = folder.file("gpt4");
  run_data("--tokenizer " + tokenizer + " --input " + folder.file("a.jsonl") + " --out " + folder.file("shards"));
  const Json manifest = read_json_file(folder.file("shards/manifest.json"));
  CHECK(manifest["vocab_size"] == 400);
  CHECK(manifest["eot"] == 0);
  const Outcome run =
      run_program("train " TRIAD_SOURCE_DIR
                  "/configs/tiny.json --set runtime.device=cpu --set train.steps=1 --set "
                  "data.kind=shards --set model.vocab_size=400 --set log.out_dir=" +
                  folder.file("run") + " --set 'data.paths=[\"" + folder.file("shards") + "/train_*.bin\"]'");
  INFO(run.output);
  CHECK(run.exit_code == 0);
}

TEST_CASE("tokenizer train: which special token precedes documents", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.txt"), "some text, some text");
  const auto eot = [&](const std::string& special) {
    fs::remove_all(folder.file("out"));
    const auto files =
        trained("--vocab-size 300 --special " + special + " --input " + folder.file("a.txt"), folder.file("out"));
    // Several tokens, none with a usual name: a file names the first.
    CHECK(files.contains("separator.json") == (special == "'<|doc|>' '<|user|>'"));
    return parse_json(files.at("tokenizer_config.json"), "").at("eos_token").get<std::string>();
  };
  CHECK(eot("'<|doc|>'") == "<|doc|>");
  CHECK(eot("'<|doc|>' '<|user|>'") == "<|doc|>");
  CHECK(eot("'<|user|>' '<|endoftext|>'") == "<|endoftext|>");
}

TEST_CASE("tokenizer train: bad input is an error that leaves nothing", "[data][bad-input]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.txt"), "some text, some text");
  write_text(folder.file("empty.txt"), "");
  write_text(folder.file("blank.jsonl"), "\n\n{\"text\": \"\"}\n");
  write_text(folder.file("bad.jsonl"), "{\"text\": \"a\"}\n{\"txt\": 1}\n");
  write_text(folder.file("cut.txt.gz"), gzip(long_text()).substr(0, 5000));
  fs::create_directory(folder.file("full"));
  write_text(folder.file("full/mine"), "mine");
  const auto before = files_of(folder.path());
  const auto refused = [&](const std::string& args, int exit_code, const std::vector<std::string>& words) {
    const Outcome outcome = run_program("tokenizer " + args);
    INFO(args << "\nexit code " << outcome.exit_code << "\n" << outcome.output);
    CHECK(outcome.exit_code == exit_code);
    for (const std::string& word : words) CHECK(has(outcome.output, word));
    CHECK(count_files(folder.path()) == 6);
    CHECK(count_files(folder.file("full")) == 1);
  };
  const auto train = [&](const std::string& file, const std::string& more = "") {
    return "train --input " + folder.file(file) + " " + more + " --out " + folder.file("out");
  };
  refused(train("empty.txt"), 1, {"no text", "empty.txt"});
  refused(train("blank.jsonl"), 1, {"no text", "blank.jsonl"});
  refused(train("none.txt"), 1, {"none.txt"});
  refused(train("full"), 1, {"full", "folder"});
  refused(train("bad.jsonl"), 1, {"bad.jsonl", "line 2"});
  refused(train("cut.txt.gz"), 1, {"cut.txt.gz"});
  refused(train("a.txt", "--vocab-size 256"), 2, {"256", "1 special token", "257"});
  refused(train("a.txt", "--vocab-size 3000000"), 2, {"3000000", "2097152"});
  refused(train("a.txt", "--special '<|a|>' '<|a|>'"), 2, {"<|a|>", "twice"});
  refused(train("a.txt", "--special x"), 2, {"special token x"});
  refused(train("a.txt", "--split gpt3"), 2, {"gpt3", "gpt2|gpt4|qwen"});
  refused(train("a.txt", "--min-frequency 0"), 2, {"min-frequency", "0"});
  refused(train("a.txt", "--max-token-bytes 1"), 2, {"max-token-bytes", "1"});
  refused(train("a.txt", "--vocab 300"), 2, {"--vocab; did you mean \"--vocab-size\"?"});
  const std::string input = "train --input " + folder.file("a.txt") + " --out ";
  refused(input + folder.file("full"), 1, {"full", "not empty"});
  refused(input + folder.file("a.txt"), 1, {"a.txt", "no folder"});
  // Before the text is read.
  refused("train --input " + folder.file("empty.txt") + " --out " + folder.file("a.txt/out"), 1, {"a.txt/out"});
  refused(input + "''", 2, {"--out"});
  refused("", 2, {"subcommand"});
}

TEST_CASE("tokenizer train: a text with too few pairs gives a smaller vocabulary, and says so", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.jsonl"), "{\"text\": \"ab ab\"}\nno record\n");
  const Outcome outcome = run_program("tokenizer train --skip-bad --input " + folder.file("a.jsonl") +
                                      " --vocab-size 300 --out " + folder.file("out"));
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  for (const char* word : {"1 bad record skipped", "259 tokens in place of the 300", "from 1 document in 1 file",
                           "2 different words", "2.500 bytes a token"})
    CHECK(has(outcome.output, word));
  CHECK(has(outcome.standard_output, "259 tokens"));
}
