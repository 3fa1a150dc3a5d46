// triad generate --prompts: texts, errors and output of a file of prompts.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <sstream>
#include <thread>

#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// A model with random weights and a context of 48 tokens; tokens are bytes.
struct Fresh {
  TemporaryFolder folder;
  std::string generate = "generate --device cpu --checkpoint " + folder.file("fresh") + " ";
  Fresh() {
    REQUIRE(run_program("init " TRIAD_SOURCE_DIR "/configs/tiny.json --out " + folder.file("fresh")).exit_code == 0);
  }
  std::string printed(const std::string& args) const {
    const Outcome outcome = run_program(generate + args);
    INFO(args << "\n" << outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return outcome.standard_output;
  }
  // The output for a file with these lines.
  std::string continued(const std::string& lines, const std::string& args = "") const {
    write_text(folder.file("prompts"), lines);
    return printed("--prompts " + folder.file("prompts") + " " + args);
  }
};

std::vector<Json> parsed(const std::string& text) {
  std::vector<Json> all;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) all.push_back(parse_json(line, "a line"));
  return all;
}

}  // namespace

TEST_CASE("generate --prompts: each text is what the prompt gives alone, in any batch", "[generate]") {
  const Fresh f;
  std::string lines;
  std::vector<std::string> alone;
  for (int i = 0; i < 25; ++i) {
    const std::string prompt(static_cast<size_t>(1 + i * 7 % 40), static_cast<char>('a' + i));
    const int tokens = i * 11 % 60, seed = 5 * i;  // some texts go on past the context of 48 tokens
    const double temperature = i % 3 == 0 ? 0 : 0.9;
    lines += Json({{"prompt", prompt}, {"max_tokens", tokens}, {"temperature", temperature}, {"seed", seed}}).dump();
    lines += "\n";
    if (i % 6 == 0)
      alone.push_back(f.printed(
          fmt::format("--json --prompt {} --tokens {} --temperature {} --seed {}", prompt, tokens, temperature, seed)));
  }
  const std::string all = f.continued(lines, "--batch 1");
  const std::vector<Json> texts = parsed(all);
  REQUIRE(texts.size() == 25);
  for (size_t i = 0; i < alone.size(); ++i) CHECK(texts[6 * i] == parse_json(alone[i], "alone"));
  for (const char* args : {"--batch 3", "--batch 16", "--batch 100", ""}) {
    INFO(args);
    CHECK(f.continued(lines, args) == all);
  }
  const Outcome piped =
      run_command("cat " + f.folder.file("prompts") + " | " TRIAD_PROGRAM " " + f.generate + "--prompts - --batch 5");
  CHECK(piped.standard_output == all);
}

TEST_CASE("generate --prompts: plain lines, blank ones, ids, and the command line's options", "[generate]") {
  const Fresh f;
  const std::string args = "--tokens 9 --seed 4 ";
  const std::string plain = f.continued("one\n\n \r\nand two\r\nthree", args);
  CHECK(plain == f.printed(args + "--json --prompt one --prompt 'and two' --prompt three"));
  CHECK(f.continued(R"({"prompt": "one"})"
                    "\n\n"
                    R"({"prompt": "and two"})"
                    "\n"
                    R"({"prompt": "three", "stop": null})",
                    args) == plain);
  CHECK(parsed(f.continued("{\"a\n", "--format text --tokens 0")).at(0)["prompt"] == "{\"a");
  // A document's beginning is a prompt, too.
  CHECK(f.continued("{\"prompt\": \"\"}\n{\"prompt_ids\": [1, 255]}\n", args) ==
        f.printed(args + "--json --prompt '' --prompt-ids 1,255"));
  // A seed of its own makes a line independent of its place.
  const std::string seeded = R"({"prompt": "x", "seed": 4})", twice = f.continued(seeded + "\n" + seeded + "\n", args);
  CHECK(twice == f.continued(R"({"prompt": "x"})", args) + f.continued(R"({"prompt": "x"})", args));
  CHECK(f.continued("x\nx\n", args) != twice);
}

TEST_CASE("generate --prompts: a text ends before a stop text", "[generate]") {
  const Fresh f;
  const std::string options = "--seed 3 --tokens 90 ";
  const Json whole = parsed(f.continued("abc\n", options)).at(0);
  // Most bytes of a random model are no letters, so a stop text is looked for among those that are.
  std::string text = whole["text"];
  size_t at = 1;
  while (at + 1 < text.size() && (text[at] <= ' ' || text[at] >= 127 || text[at + 1] <= ' ' || text[at + 1] >= 127))
    ++at;
  REQUIRE(at + 1 < text.size());
  const std::string stop = text.substr(at, 2);  // two tokens
  const auto with = [&](const Json& stops) {
    return parsed(f.continued(Json({{"prompt", "abc"}, {"stop", stops}}).dump(), options)).at(0);
  };
  for (const Json& stops : {Json(stop), Json::array({"no such text", stop}), Json::array({stop.substr(1), stop})}) {
    const Json cut = with(stops);
    INFO(stops.dump() << " in " << whole.dump());
    CHECK(cut["text"] == text.substr(0, text.find(stop)));
    CHECK(cut["stopped"] == true);
    CHECK(cut["tokens"].size() <= whole["tokens"].size());
  }
  CHECK(with("no such text") == whole);
  CHECK(with(Json::array()) == whole);
}

TEST_CASE("generate --prompts: bad lines have an error each, and the others their texts", "[generate]") {
  const Fresh f;
  const std::string good = R"({"prompt": "good", "max_tokens": 2})", result = f.continued(good);
  const std::string too_long(60, 'x');
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"prompt": "a")", "line 2"},
      {"[1]", "no object"},
      {R"({"prompt": 7})", "prompt.prompt is 7"},
      {R"({"promt": "a"})", "prompt.promt"},
      {R"({"max_tokens": 3})", "one of \"prompt\" and \"prompt_ids\" is needed"},
      {R"({"prompt": "a", "prompt_ids": [1]})", "one of \"prompt\" and \"prompt_ids\" is needed"},
      {R"({"prompt": "a", "stop": 5})", "prompt.stop is 5"},
      {R"({"prompt": "a", "stop": ["b", 5]})", "prompt.stop"},
      {R"({"prompt": "a", "stop": ""})", "a stop text is empty"},
      {R"({"prompt": "a", "max_tokens": -1})", "prompt.max_tokens is -1"},
      {R"({"prompt": "a", "max_tokens": 1.5})", "prompt.max_tokens is 1.5"},
      {R"({"prompt": "a", "temperature": "hot"})", "prompt.temperature is \"hot\""},
      {R"({"prompt": "a", "temperature": -1})", "prompt.temperature is -1"},
      {R"({"prompt": "a", "top_p": 2})", "prompt.top_p is 2"},
      {R"({"prompt": "a", "seed": 0.5})", "prompt.seed is 0.5"},
      {R"({"prompt_ids": []})", "prompt_ids"},
      {R"({"prompt_ids": [1, 256]})", "256"},
      {R"({"prompt_ids": [0.5]})", "0.5"},
      {R"({"prompt": ")" + too_long + R"("})", "the prompt has 61 tokens, and the context holds 48"},
  };
  std::string lines = good + "\n";
  for (const auto& [line, words] : cases) lines += line + "\n";
  lines += good + "\n";
  write_text(f.folder.file("bad"), lines);
  for (const char* batch : {"1", "4"}) {
    const Outcome outcome =
        run_program(f.generate + "--format jsonl --prompts " + f.folder.file("bad") + " --batch " + batch);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.output, fmt::format("{} of {} prompts could not be continued: {} line 2: ", cases.size(),
                                          cases.size() + 2, f.folder.file("bad"))));
    const std::vector<Json> all = parsed(outcome.standard_output);
    REQUIRE(all.size() == cases.size() + 2);
    for (size_t i = 0; i < cases.size(); ++i) {
      INFO(cases[i].first << "\n" << all[i + 1].dump());
      REQUIRE(all[i + 1].contains("error"));
      CHECK(has(all[i + 1]["error"].get<std::string>(), fmt::format("line {}: ", i + 2)));
      CHECK(has(all[i + 1]["error"].get<std::string>(), cases[i].second));
    }
    CHECK(all.front() == parse_json(result, "result"));
    CHECK(all.back()["prompt"] == "good");
  }
  const std::string truncated = R"({"prompt": ")" + too_long + R"(", "truncate": true, "max_tokens": 1})";
  CHECK(parsed(f.continued(truncated)).at(0)["tokens"].size() == 1);
  // More bad lines than texts are kept in memory, before a good one.
  std::string many;
  for (int i = 0; i < 200; ++i) many += "{}\n";
  write_text(f.folder.file("many"), many + good + "\n");
  const Outcome last = run_program(f.generate + "--prompts " + f.folder.file("many") + " --batch 1");
  CHECK(parsed(last.standard_output).size() == 201);
}

TEST_CASE("generate --prompts: usage, and memory that does not suffice", "[generate]") {
  const Fresh f;
  write_text(f.folder.file("one"), "a\n");
  const std::string file = "--prompts " + f.folder.file("one") + " ";
  const auto fails = [&](const std::string& args, int exit_code, const std::string& words) {
    const Outcome outcome = run_program(f.generate + args);
    INFO(args << "\n" << outcome.output);
    CHECK(outcome.exit_code == exit_code);
    CHECK(has(outcome.output, words));
    CHECK(outcome.standard_output.empty());
  };
  fails(file + "--prompt a", 2, "--prompts");
  fails("--prompts ''", 2, "path");
  fails("--prompts " + f.folder.file("absent"), 1, f.folder.file("absent"));
  fails(file + "--batch -1", 2, "--batch");
  // With 2 GB of addresses the model itself fits.
  const auto lacks_memory = [&](const std::string& args, const std::string& words) {
    const Outcome outcome =
        run_command("ulimit -v 2000000; MALLOC_ARENA_MAX=1 OMP_NUM_THREADS=1 " TRIAD_PROGRAM " " + f.generate + args);
    INFO(args << "\n" << outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.output, words));
    CHECK(outcome.standard_output.empty());
  };
#ifndef __SANITIZE_ADDRESS__  // the sanitizer needs more addresses
  lacks_memory(file + "--context 1000000", "a smaller --context is needed");
  std::string lines;
  for (int i = 0; i < 100; ++i) lines += "a\n";
  write_text(f.folder.file("many"), lines);
  lacks_memory("--prompts " + f.folder.file("many") + " --batch 100 --context 60000", ": --batch ");
  const Outcome fewer = run_command("ulimit -v 2000000; MALLOC_ARENA_MAX=1 OMP_NUM_THREADS=1 " TRIAD_PROGRAM " " +
                                    f.generate + "--prompts " + f.folder.file("many") + " --context 200000 --tokens 1");
  INFO(fewer.output);
  CHECK(parsed(fewer.standard_output).size() == 100);
#endif
  write_text(f.folder.file("empty"), "");
  CHECK(f.printed("--prompts " + f.folder.file("empty") + " --format text").empty());
}

TEST_CASE("generate --prompts: a full disk and Ctrl-C leave whole lines", "[generate]") {
  const Fresh f;
  std::string lines;
  for (int i = 0; i < 50; ++i) lines += "abc\n";
  write_text(f.folder.file("prompts"), lines);
  const std::string program = std::string(TRIAD_PROGRAM) + " " + f.generate + "--tokens 5 --prompts ",
                    out = f.folder.file("out");
  const Outcome full = run_command(program + f.folder.file("prompts") + " > /dev/full");
  CHECK(full.exit_code == 1);
  CHECK(has(full.output, "standard output cannot be written: No space left on device"));
  const auto whole_lines = [&] {
    const std::string text = read_text(out);
    REQUIRE(!text.empty());
    CHECK(text.back() == '\n');
    return parsed(text).size();
  };
  // A file of at most 1,024 bytes takes a part of a line.
  const Outcome limited = run_command("ulimit -f 1; " + program + f.folder.file("prompts") + " > " + out);
  INFO(limited.output);
  CHECK(limited.exit_code == 1);
  CHECK(has(limited.output, "File too large"));
  CHECK(whole_lines() < 50);
  for (int i = 0; i < 15; ++i) lines += lines;  // no machine is done with so many
  write_text(f.folder.file("endless"), lines);
  std::filesystem::remove(out);
  BackgroundProgram endless(f.generate + "--tokens 5 --prompts " + f.folder.file("endless"), "", out);
  while (!std::filesystem::exists(out) || std::filesystem::file_size(out) == 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  endless.send(SIGINT);
  CHECK(endless.wait() == 130);
  CHECK(whole_lines() >= 1);
}
