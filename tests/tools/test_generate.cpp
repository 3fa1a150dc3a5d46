// triad generate: seeds, batches, stop tokens, contexts, sampling options; and triad bench decode's CSV.
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <numeric>
#include <regex>
#include <sstream>

#include "engine/random_streams.h"
#include "engine/rng.h"
#include "io/json_config.h"
#include "model/decoding/sampling.h"
#include "tests/support/huggingface_folder.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using triad::test::kTiny;
using triad::test::Outcome;
using triad::test::run_program;
using triad::test::TemporaryFolder;

namespace {

std::string init_tiny(const TemporaryFolder& folder) {
  REQUIRE(run_program("init " + kTiny + " --out " + folder.file("fresh")).exit_code == 0);
  return "generate --device cpu --checkpoint " + folder.file("fresh") + " ";
}
std::string printed(const std::string& args) {
  const Outcome outcome = run_program(args);
  INFO(args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return outcome.standard_output;
}

}  // namespace

TEST_CASE("generate: a text on the CPU is the same alone and in a batch, and depends on the seed", "[generate]") {
  const TemporaryFolder folder;
  const std::string generate = init_tiny(folder);
  const std::string greedy = " --tokens 20 --temperature 0";
  const std::string one = printed(generate + "--prompt one" + greedy),
                    longer = printed(generate + "--prompt longer" + greedy);
  CHECK(printed(generate + "--prompt one --prompt longer" + greedy) == one + "---\n" + longer);
  const std::string drawn = generate + "--prompt x --tokens 30 --top-k 50 --top-p 0.9 --seed ";
  CHECK(printed(drawn + "1") == printed(drawn + "1"));
  CHECK(printed(drawn + "1") != printed(drawn + "2"));
}

TEST_CASE("generate: a text continues past its context, and ends at a stop token", "[generate]") {
  const TemporaryFolder folder;
  const std::string fresh = init_tiny(folder) + "--temperature 0 ", generate = fresh + "--prompt abc ";
  const std::string text = printed(generate + "--tokens 12");
  // 3 prompt bytes, 12 one-byte tokens (none ends the text), and a line feed.
  REQUIRE(text.size() == 3 + 12 + 1);
  for (const char* context : {"1", "2", "7"}) {
    INFO(context);
    CHECK(printed(generate + "--tokens 40 --context " + context).size() >= 4);
  }
  const size_t first = text.find(text[8], 3);  // where the stop token, text[8], occurs first
  const std::string stop = "--stop " + std::to_string(static_cast<unsigned char>(text[8]));
  CHECK(printed(generate + "--tokens 12 " + stop) == text.substr(0, first) + "\n");
  const Outcome refused = run_program(generate + "--stop 300");
  CHECK(refused.exit_code == 2);
  CHECK(refused.output.find("300") != std::string::npos);
}

TEST_CASE("generate: a text ends before a stop text, which may be several tokens", "[generate]") {
  const TemporaryFolder folder;
  const std::string fresh = init_tiny(folder), generate = fresh + "--prompt abc --temperature 0 --tokens 12 ";
  const auto quoted = [](const std::string& text) {
    return "--stop=$'" + [&] {
      std::string escaped;
      for (const char c : text) escaped += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
      return escaped;
    }() + "'";
  };
  const auto in_bash = [](const std::string& args) {
    const std::string command = std::string(TRIAD_PROGRAM) + " " + args;
    std::string script;
    for (const char c : command) script += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return triad::test::run_command("bash -c '" + script + "'");
  };
  const std::string text = printed(generate), sampled = text.substr(3, 12);
  const std::string stop = sampled.substr(5, 3);
  const std::string expected = "abc" + sampled.substr(0, sampled.find(stop)) + "\n";
  CHECK(in_bash(generate + quoted(stop)).standard_output == expected);
  // What begins as a stop text and does not end as one is printed; a stop text that does not occur changes nothing.
  CHECK(in_bash(generate + quoted(sampled.substr(10) + "!")).standard_output == text);
  CHECK(in_bash(generate + quoted("!" + stop) + " " + quoted(stop)).standard_output == expected);
  const Json line = parse_json(in_bash(generate + "--json " + quoted(stop)).standard_output, "generate");
  CHECK(line["stopped"] == true);
  CHECK(line["tokens"].size() == sampled.find(stop) + stop.size());
  // A text among several ends by itself.
  CHECK(triad::test::has(in_bash(generate + "--prompt longer " + quoted(stop)).standard_output, expected + "---\n"));
  for (const auto& [more, why] :
       {std::pair{"--prompt a --stop ''", "--stop is empty"}, {"--prompt-ids 1 --stop x", "the id of a token"}}) {
    const Outcome refused = run_program(fresh + more);
    INFO(refused.output);
    CHECK(refused.exit_code == 2);
    CHECK(triad::test::has(refused.output, why));
  }
}

TEST_CASE("generate: a text whose cache is full goes on after its last half", "[generate]") {
  const TemporaryFolder folder;
  // Weights so large that a token depends on more than the one before it.
  REQUIRE(run_program("init " + kTiny + " --set model.init_std=0.5 --out " + folder.file("large")).exit_code == 0);
  const auto tokens = [&](const std::vector<int>& prompt, int count) {
    return parse_json(printed(fmt::format("generate --device cpu --json --temperature 0 --context 8 --prompt-ids {} "
                                          "--tokens {} --checkpoint {}",
                                          fmt::join(prompt, ","), count, folder.file("large"))),
                      "generate")["tokens"];
  };
  bool differ = false;
  for (int i = 0; i < 6; ++i) {
    std::vector<int> text;
    for (int j = 1; j <= 8; ++j) text.push_back((37 * i + j * j * 11) % 251 + 1);
    const Json two = tokens(text, 2);
    if (two.size() < 2) continue;  // a stop token
    text.push_back(two.at(0));
    const Json after_half = tokens({text.end() - 4, text.end()}, 1);
    CHECK(two.at(1) == after_half.at(0));
    differ = differ || tokens({text.end() - 8, text.end()}, 1) != after_half;
  }
  CHECK(differ);
}

TEST_CASE("generate: no tokens, and tokens that the tokenizer lacks", "[generate]") {
  const TemporaryFolder folder;
  const std::string fresh = init_tiny(folder);
  CHECK(printed(fresh + "--prompt abc --tokens 0") == "abc\n");
  CHECK(printed(fresh + "--prompt-ids 1,2 --prompt b --tokens 0") == "b\n---\n1,2\n");
  CHECK(parse_json(printed(fresh + "--prompt abc --tokens 0 --json"), "generate") ==
        Json({{"prompt", "abc"}, {"text", ""}, {"tokens", Json::array()}, {"stopped", false}}));
  // The vocabulary has a hole before its last token, and the model's is padded.
  constexpr int64_t kLast = 460, kPadded = 512;
  Json tokenizer = parse_json(test::bpe_tokenizer_json(), "tokenizer");
  tokenizer["added_tokens"].push_back({{"id", kLast}, {"content", "<|last|>"}, {"special", true}});
  test::write_text(folder.file("tokenizer.json"), tokenizer.dump());
  printed(fmt::format("init {} --set model.vocab_size={} --set data.tokenizer={} --out {}", kTiny, kPadded,
                      folder.file("tokenizer.json"), folder.file("padded")));
  const std::string generate =
      "generate --device cpu --tokens 100 --temperature 1000 --prompt a --prompt b --prompt c ";
  std::istringstream lines(printed(generate + "--json --checkpoint " + folder.file("padded")));
  bool in_hole = false, past_last = false;
  for (std::string line; std::getline(lines, line);) {
    const Json sampled = parse_json(line, "generate");
    for (const Json& token : sampled["tokens"]) {
      in_hole = in_hole || (token >= test::kBpeTokens && token < kLast);
      past_last = past_last || token > kLast;
    }
  }
  CHECK(in_hole);
  CHECK(past_last);
  CHECK(printed(generate + "--checkpoint " + folder.file("padded")).find('?') != std::string::npos);
}

TEST_CASE("generate: sampling uses other random numbers than the weights of the same seed", "[generate]") {
  const TemporaryFolder folder;
  // The weights are so small that all logits are 0. Token i is then the i-th random number in the prompt's stream,
  // times 256.
  REQUIRE(run_program("init " + kTiny + " --set model.init_std=1e-30 --out " + folder.file("fresh")).exit_code == 0);
  const auto drawn_from = [](uint64_t stream) {
    const Philox random(1337, stream);
    std::string text;
    for (uint64_t i = 0; i < 20; ++i) {
      const auto token = static_cast<char>(random.uniform(i) * 256);
      if (token == 0) break;  // end of text
      text += token;
    }
    return text;
  };
  const std::string text = printed("generate --device cpu --tokens 20 --seed 1337 --prompt x --prompt y --checkpoint " +
                                   folder.file("fresh"));
  const std::string first = drawn_from(random_stream(RandomUse::sampling, 0)),
                    second = drawn_from(random_stream(RandomUse::sampling, 1));
  CHECK(first.size() > 3);
  CHECK(second.size() > 3);
  CHECK(text == "x" + first + "\n---\ny" + second + "\n");
}

TEST_CASE("generate: top k and top p keep the most likely tokens", "[generate]") {
  const std::vector<float> logits = {0, 2, 1, 2, -1};
  for (int i = 0; i < 100; ++i) {
    const double uniform = i / 100.0;
    CHECK(sample_token(logits, {.temperature = 0}, uniform) == 1);
    CHECK(sample_token(logits, {.top_k = 1}, uniform) == 1);  // the first of two equal logits is kept
    const int32_t top_two = sample_token(logits, {.top_k = 2}, uniform);
    CHECK(top_two == (i < 50 ? 1 : 3));
    CHECK(sample_token(logits, {.top_p = 0.3}, uniform) == 1);
    CHECK(sample_token(logits, {}, uniform) != -1);
  }
}

namespace {

// What sample_token() returns, from all tokens in order.
int32_t sample_sorted(const std::vector<float>& logits, const SamplingOptions& o, double uniform) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (o.top_k > 0) order.resize(static_cast<size_t>(o.top_k));
  std::vector<double> weights;
  for (const int32_t token : order) weights.push_back(std::exp(double{logits[token]} / o.temperature));
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double kept = 0;
  size_t count = 0;
  while (count < order.size() && (count == 0 || kept < o.top_p * total)) kept += weights[count++];
  double sum = 0;
  for (size_t i = 0; i < count; ++i)
    if ((sum += weights[i]) > uniform * kept) return order[i];
  return order[count - 1];
}

}  // namespace

TEST_CASE("generate: a draw from a large vocabulary is that of all tokens in order", "[generate]") {
  const Philox random(5, 0);
  std::vector<float> logits;
  for (uint64_t i = 0; i < 1000; ++i) logits.push_back(static_cast<float>(random.normal(i)));
  for (size_t i = 0; i < 1000; i += 7) logits[i] = logits[3];
  for (const SamplingOptions& o : {SamplingOptions{},
                                   {.temperature = 0.1},
                                   {.temperature = 30},
                                   {.top_k = 300},
                                   {.top_p = 0.2},
                                   {.top_p = 0.97},
                                   {.temperature = 5, .top_k = 500, .top_p = 0.9}}) {
    INFO(o.temperature << ", top k " << o.top_k << ", top p " << o.top_p);
    for (uint64_t i = 0; i < 500; ++i) {
      const double uniform = random.uniform(2000 + i);
      CHECK(sample_token(logits, o, uniform) == sample_sorted(logits, o, uniform));
    }
  }
}

TEST_CASE("bench prefill and decode count the keys that are read", "[generate]") {
  // With l 8, d 4, l' 8, n 4 and w 16 a step reads 24 compressed keys, 3*8 + 4 selected ones and 16 in the sliding
  // window, if the context has 100 tokens.
  const std::string one_softmax = "--set nsa.selector=index --set nsa.branches=sel";
  const std::string mixed = R"(--set 'nsa.layers=[{"layers":"1:2","branches":"win","w":20}]')";
  const std::vector<std::array<std::string, 2>> kinds = {
      {"", "68"},          {"--set model.attention=dense", "100"}, {"--set nsa.selector=index", "68"},
      {one_softmax, "28"}, {"--set nsa.branches=win", "16"},       {mixed, "44"}};
  for (const std::string verb :
       {"prefill ", "prefill --batch 3 ", "decode ", "decode --batch 3 ", "decode --batch 64 "})
    for (const auto& [kind, expected] : kinds) {
      if (verb == "decode --batch 64 " && !kind.empty()) continue;  // each prompt has a pass of its own
      const std::string args = "bench " + verb + kTiny + " --lengths 9,32,33,100 --runs 1 --set runtime.device=cpu ";
      INFO(args << kind);
      std::istringstream csv(printed(args + kind));
      std::string line;
      std::getline(csv, line);
      CHECK(line ==
            "S,ms_total,ms_cmp,ms_sel,ms_win,reads_actual,reads_expected,reads_actual_decode,reads_expected_decode");
      int rows = 0;
      while (std::getline(csv, line)) {
        ++rows;
        std::vector<std::string> cells;
        std::istringstream cell_stream(line);
        for (std::string cell; std::getline(cell_stream, cell, ',');) cells.push_back(cell);
        REQUIRE(cells.size() == 9);
        CHECK(cells[5] == cells[6]);
        CHECK(cells[7] == cells[8]);
        if (cells[0] == "100") CHECK(cells[6] == expected);
      }
      CHECK(rows == 4);
    }
}

TEST_CASE("bench decode writes rows, and compares with kept ones", "[generate]") {
  const TemporaryFolder folder;
  const std::string kept = folder.file("kept.jsonl");
  const std::string args = "bench decode " + kTiny + " --lengths 20,33 --runs 1 --set runtime.device=cpu ";
  printed(args + "--append " + kept);
  printed("bench prefill " + kTiny + " --lengths 33 --batch 3 --runs 1 --set runtime.device=cpu --append " + kept);
  const Outcome same =
      // No kept row has a new one's key, because the new batches have 2 sequences.
      run_program(args + "--batch 2 --compare " + kept);
  CHECK(same.exit_code == 0);
  CHECK(same.output.find("0 rows compared, 2 without a kept row") != std::string::npos);
  std::ifstream file(kept);
  std::stringstream text;
  text << file.rdbuf();
  CHECK(text.str().find("tiny 1x33") != std::string::npos);
  CHECK(text.str().find("tiny 3x33") != std::string::npos);
  std::ofstream(kept) << std::regex_replace(text.str(), std::regex(R"("us": ?[0-9.e+-]+)"), "\"us\":0.001");
  const Outcome slower = run_program(args + "--compare " + kept);
  CHECK(slower.exit_code == 1);
  CHECK(slower.output.find("2 of 2 rows are more than 5% slower") != std::string::npos);
}
