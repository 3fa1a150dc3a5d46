// What helps at the command line: triad completion, triad train --schema, --help.
#include <algorithm>
#include <filesystem>

#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"

using namespace triad;
using namespace triad::test;

namespace {

std::string completed(const std::string& line) {
  const Outcome outcome = run_program("completion --line '" + line + "'");
  CHECK(outcome.exit_code == 0);
  std::string words = outcome.output;
  std::replace(words.begin(), words.end(), '\n', ' ');
  return words;
}

Json schema() { return Json::parse(run_program("train --schema").output); }

}  // namespace

TEST_CASE("completion: verbs, options, config keys and their words follow what was typed", "[tools]") {
  struct Row {
    const char *line, *words;
  };
  const Row row = GENERATE(values<Row>({
      {"triad tr", "train "},
      {"build/cpu/triad  help pl", "plan "},
      {"triad train --over", "--overwrite "},
      {"triad train a.json --set model.mlp=", "model.mlp=silu model.mlp=swiglu "},
      {"triad train --set=model.mlp=sw", "--set=model.mlp=swiglu "},
      {"triad train --set model.tie", "model.tie_embeddings= "},
      {"triad plan --set model.tie_embeddings=t", "model.tie_embeddings=true "},
      {"triad train --set \"model.qk_norm=", "model.qk_norm=true model.qk_norm=false "},
      {"triad eval --needle --task co", "counting copy "},
      {"triad eval --task=co", "--task=counting --task=copy "},
      {"triad train --resume l", "latest "},
      {"triad completion z", "zsh "},
      {"triad tokenizer t", "train "},
      {"triad tokenizer train --vo", "--vocab-size "},
      {"triad tokenizer train --split q", "qwen "},
      {"triad train conf", ""},            // a file
      {"triad train --set a=1 conf", ""},  // a file too
      {"triad eval --checkpoint ru", ""},  // and an option's
      {"triad bananas --he", ""},
      {"triad", ""},
      {"", ""},
  }));
  INFO(row.line);
  CHECK(completed(row.line) == row.words);
}

TEST_CASE("completion: bash completes the part of a word that it replaces", "[tools]") {
  const std::string program = TRIAD_PROGRAM;
  const Outcome outcome =
      run_command("bash -c 'eval \"$(" + program + " completion bash)\"; complete -p triad; COMP_WORDBREAKS=\" =:\"; " +
                  "COMP_LINE=\"triad train --set model.mlp=s --overwrite\"; COMP_POINT=29; COMP_WORDS=(" + program +
                  " train --set model.mlp = s); _triad; printf \"<%s>\" \"${COMPREPLY[@]}\"'");
  CHECK(outcome.output == "complete -o default -F _triad triad\n<silu><swiglu>");
  CHECK(run_program("completion").exit_code == 2);
  CHECK(run_program("completion fish").exit_code == 2);
}

TEST_CASE("schema: it has every key, and words that a config may have", "[tools]") {
  const Json groups = schema()["properties"];
  const Json defaults = config_to_json(Config());
  for (const auto& [group, keys] : defaults.items())
    for (const auto& [key, value] : keys.items()) {
      INFO(group << "." << key);
      const Json& known = groups[group]["properties"];
      REQUIRE(known.contains(key));
      CHECK(!known[key]["description"].get<std::string>().empty());
      if (known[key].contains("default")) CHECK(known[key]["default"] == value);
    }
  for (const auto& [group, schema_of_group] : groups.items()) {
    if (group == "$schema") continue;
    for (const auto& [key, value] : schema_of_group["properties"].items())
      for (const Json& word : value.value("enum", Json::array())) {
        // Other keys may forbid the word, but no error may say that the key does not know it.
        std::string text;
        Json root = read_json_file(TRIAD_SOURCE_DIR "/configs/tiny.json");
        root["$schema"] = "triad.schema.json";
        root[group][key] = word;
        try {
          config_from_json(root);
        } catch (const Error& e) { text = e.what(); }
        INFO(group << "." << key << " = " << word << ": " << text);
        CHECK(text.find("is allowed") == std::string::npos);
        CHECK(text.find("unknown") == std::string::npos);
      }
  }
  CHECK(groups["train"]["properties"]["eps"]["exclusiveMinimum"] == 0.0);
  CHECK(groups["data"]["properties"]["paths"]["anyOf"][1]["items"]["anyOf"][1]["properties"].contains("weight"));
}

TEST_CASE("help: a topic leaves its own lines", "[tools]") {
  const Outcome keys = run_program("train --help nsa.d_");
  CHECK(keys.exit_code == 0);
  CHECK(keys.output.starts_with("  nsa.d_index "));
  CHECK(std::count(keys.output.begin(), keys.output.end(), '\n') == 1);
  CHECK(run_program("bench attention --help shapes").output.find("--documents") == std::string::npos);
  CHECK(run_program("train --help bananas").exit_code == 2);
}
