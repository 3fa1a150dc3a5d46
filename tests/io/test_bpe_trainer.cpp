// Learning byte-level BPE: the words that are counted, and known merges. The expected ones are those of the
// `tokenizers` library; tests/tools/test_tokenizer_train.py compares whole vocabularies with it.
#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "engine/process/text.h"
#include "io/json_config.h"
#include "io/tokenizer/bpe_trainer.h"
#include "io/tokenizer/tokenizer_file.h"
#include "io/tokenizer/unicode.h"
#include "io/tokenizer/word_counter.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using triad::test::check_error;
using triad::test::TemporaryFolder;
using triad::test::write_text;

namespace {

using Counts = std::map<std::string, int64_t>;
using Merges = std::vector<std::string>;

Counts counts_of(WordCounter& counter) {
  Counts counts;
  for (const WordCounts& part : counter.finish().parts())
    for (size_t i = 0; i < part.size(); ++i) CHECK(counts.emplace(part.word(i), part.count(i)).second);
  return counts;
}

// Counts the words of each text alone.
Counts words_of(WordSplit split, const std::vector<std::string>& texts) {
  WordCounter counter(split);
  std::vector<int32_t> none;
  for (const std::string& text : texts) counter.append(text, none);
  CHECK(none.empty());
  return counts_of(counter);
}

TrainedBpe trained(const std::string& text, const BpeTrainerOptions& options) {
  WordCounter counter(WordSplit::gpt2);
  std::vector<int32_t> none;
  counter.append(text, none);
  return train_bpe(counter.finish(), options, [](int64_t) {});
}

Merges merges_of(const TrainedBpe& bpe) {
  Merges merges;
  for (const auto& [left, right] : bpe.merges)
    merges.push_back(bpe.tokens[static_cast<size_t>(left)] + " " + bpe.tokens[static_cast<size_t>(right)]);
  return merges;
}

std::vector<std::string> learned(const TrainedBpe& bpe, size_t special) {
  return {bpe.tokens.begin() + static_cast<int64_t>(special) + 256, bpe.tokens.end()};
}

std::string random_text(std::mt19937& random, size_t pieces) {
  const std::vector<std::string> kinds = {"the",     " the",         " ",      "  ",       "\n",     "\r\n",   "\t",
                                          "'s",      "'LL",          "'",      "12",       "3456",   ".",      "...",
                                          " {",      "\u4e2d\u6587", "\u4e2d", "\u3002",   "\u3000", "\u00a0", "\u0639",
                                          "e\u0301", "\U0001f44d",   "\xff",   "\xe4\xb8", "a",      "Z",      "-"};
  std::string text;
  for (size_t i = 0; i < pieces; ++i) text += kinds[random() % kinds.size()];
  return text;
}

const std::vector<std::string> kEot = {"<|endoftext|>"};
constexpr WordSplit kSplits[] = {WordSplit::gpt2, WordSplit::gpt4, WordSplit::qwen};

}  // namespace

TEST_CASE("bpe training: words of the three splits", "[tokenizer]") {
  const std::string text = "Don't stop\n\n  12345 x";
  CHECK(words_of(WordSplit::gpt2, {text}) ==
        Counts{{"Don", 1}, {"'t", 1}, {" stop", 1}, {"\n\n ", 1}, {" 12345", 1}, {" x", 1}});
  CHECK(words_of(WordSplit::gpt4, {text}) ==
        Counts{{"Don", 1}, {"'t", 1}, {" stop", 1}, {"\n\n", 1}, {" ", 2}, {"123", 1}, {"45", 1}, {" x", 1}});
  CHECK(words_of(WordSplit::qwen, {text})["1"] == 1);
  // Bytes that are not UTF-8 are words of their own.
  CHECK(words_of(WordSplit::gpt4, {"a\xff\xfe b", "a"}) == Counts{{"a", 2}, {"\xff\xfe", 1}, {" b", 1}});
}

TEST_CASE("bpe training: a text may be cut where the counter says", "[tokenizer]") {
  std::mt19937 random(3);
  for (const WordSplit split : kSplits) {
    const WordCounter counter(split);
    int cuts = 0;
    for (int i = 0; i < 400; ++i) {
      const std::string text = random_text(random, 24);
      for (size_t end = 1; end < text.size(); end += 7) {
        const size_t cut = counter.safe_cut(std::string_view(text).substr(0, end));
        REQUIRE(cut < end);
        if (cut == 0) continue;
        ++cuts;
        INFO(word_of(split) << ": " << printable(text) << " cut at " << cut);
        REQUIRE(words_of(split, {text}) == words_of(split, {text.substr(0, cut), text.substr(cut)}));
      }
    }
    CHECK(cuts > 1000);
  }
  CHECK(WordCounter(WordSplit::gpt4).safe_cut("\u4e2d\u6587\n\u4e2d") == 6);
  CHECK(WordCounter(WordSplit::gpt4).safe_cut("....\n....") == 0);
}

TEST_CASE("bpe training: threads count all words together", "[tokenizer][threads]") {
  constexpr int kThreads = 4, kTexts = 40;
  std::mt19937 random(5);
  std::vector<std::string> texts;
  for (int i = 0; i < kTexts; ++i) {
    texts.push_back(random_text(random, 300));
    for (int word = 0; word < 12'000; ++word) texts.back() += " " + std::to_string(random() % 2'000'000);
  }
  WordCounter counter(WordSplit::gpt2);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      std::vector<int32_t> none;
      for (int i = t; i < kTexts; i += kThreads) counter.append(texts[static_cast<size_t>(i)], none);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(counter.size() > 0);  // enough that threads have handed over theirs in between
  CHECK(counts_of(counter) == words_of(WordSplit::gpt2, texts));
}

TEST_CASE("bpe training: known merges", "[tokenizer]") {
  // Runs are merged from the left, and overlapping pairs count each.
  CHECK(merges_of(trained("aaaa aaa aaaaaaa", {.vocab_size = 300, .special_tokens = kEot})) ==
        Merges{"a a", "aa aa", "aa a", "\u0120 aaaa", "\u0120 aaa", "\u0120aaaa aaa"});
  // Equally frequent: the pair with the lowest ids.
  const TrainedBpe ties = trained("abc abc xbc xbc ab ab", {.vocab_size = 300, .special_tokens = kEot});
  CHECK(merges_of(ties) == Merges{"a b", "\u0120 ab", "b c", "x bc", "\u0120 xbc", "ab c", "\u0120ab c"});
  CHECK(ties.words == 4);
  CHECK(ties.text_bytes == 21);
  CHECK(ties.text_tokens == 6);
  // Ids: special tokens, the byte alphabet by code point, what was learned.
  CHECK(ties.tokens[0] == "<|endoftext|>");
  CHECK(ties.tokens[1] == "!");
  CHECK(ties.tokens[256] == spell_byte(0xad));
  CHECK(learned(ties, 1) == std::vector<std::string>{"ab", "\u0120ab", "bc", "xbc", "\u0120xbc", "abc", "\u0120abc"});
  // The vocabulary's size ends it.
  CHECK(merges_of(trained("abc abc xbc xbc ab ab", {.vocab_size = 259, .special_tokens = kEot})) ==
        Merges{"a b", "\u0120 ab"});
  CHECK(trained("abc", {.vocab_size = 257, .special_tokens = kEot}).merges.empty());
  // A special token that a merge makes gets no second id; in the text it is plain text.
  const TrainedBpe special = trained("x <|endoftext|> <|endoftext|> the the the",
                                     {.vocab_size = 300, .special_tokens = {"<|endoftext|>", "the"}});
  CHECK(learned(special, 2) == std::vector<std::string>{"he", "\u0120the", "<|", "do", "en", "ex", "ft", "|>",
                                                        "\u0120<|", "doft", "endoft", "ext", "endoftext"});
  CHECK(merges_of(special)[1] == "t he");
}

TEST_CASE("bpe training: the least frequency and the longest token", "[tokenizer]") {
  const std::string text = "abcdefgh abcdefgh abcdefgh xy xy";
  const auto at_least = [&](int64_t frequency) {
    return merges_of(trained(text, {.vocab_size = 300, .special_tokens = kEot, .min_frequency = frequency}));
  };
  CHECK(at_least(4).empty());
  CHECK(at_least(3).size() == 7);  // the byte before a word occurs twice
  CHECK(at_least(2).size() == 10);
  const auto at_most = [&](int64_t bytes) {
    return learned(trained("abcdefgh abcdefgh ", {.vocab_size = 300, .special_tokens = kEot, .max_token_bytes = bytes}),
                   1);
  };
  CHECK(at_most(2) == std::vector<std::string>{"ab", "cd", "ef", "gh"});
  CHECK(at_most(3) == std::vector<std::string>{"ab", "cd", "ef", "gh", "\u0120ab"});
  CHECK(at_most(4) == std::vector<std::string>{"ab", "cd", "ef", "gh", "abcd", "efgh"});
}

TEST_CASE("bpe training: the words' order does not matter, and every token is a text of its own", "[tokenizer]") {
  std::mt19937 random(11);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::string> texts;
    for (int i = 0; i < 30; ++i) {
      std::string text;
      for (size_t n = random() % 60; n-- > 0;) text += "aab2\n"[random() % 5];
      texts.push_back(text + " ");
    }
    const WordSplit split = kSplits[round % 3];
    const auto train = [&] {
      WordCounter counter(split);
      std::vector<int32_t> none;
      for (const std::string& text : texts) counter.append(text, none);
      return train_bpe(counter.finish(), {.vocab_size = 500, .special_tokens = kEot}, [](int64_t) {});
    };
    const TrainedBpe first = train();
    std::shuffle(texts.begin(), texts.end(), random);
    const TrainedBpe second = train();
    CHECK(first.tokens == second.tokens);
    CHECK(first.merges == second.merges);
    CHECK(first.merges.size() == first.tokens.size() - 257);
    const TemporaryFolder folder;
    write_text(folder.file("tokenizer.json"), tokenizer_json(first, kEot, split));
    if (split != WordSplit::gpt2) {  // its file names it by ByteLevel's own pattern
      const Json json = read_json_file(folder.file("tokenizer.json"));
      CHECK(json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] == pattern_of(split));
    }
    const auto tokenizer = make_tokenizer(folder.path());
    CHECK(tokenizer->vocab_size() == static_cast<int64_t>(first.tokens.size()));
    CHECK(tokenizer->eot() == 0);
    size_t tokens = 0;  // encoding by ranks gives the tokens of the training
    for (const std::string& text : texts) {
      const std::vector<int32_t> encoded = tokenizer->encode(text);
      CHECK(tokenizer->decode(encoded) == text);
      tokens += encoded.size();
    }
    CHECK(static_cast<int64_t>(tokens) == first.text_tokens);
  }
}

TEST_CASE("bpe training: options that no vocabulary can have", "[tokenizer]") {
  const auto refused = [](int64_t vocab_size, const std::vector<std::string>& special,
                          const std::vector<std::string>& words) {
    check_error([&] { check_bpe_options({.vocab_size = vocab_size, .special_tokens = special}); }, words);
  };
  refused(256, kEot, {"256", "1 special token", "257"});
  refused(255, {}, {"255", "256"});
  refused(300, {""}, {"empty"});
  refused(300, {"<|a|>", "<|a|>"}, {"<|a|>", "twice"});
  refused(300, {"a"}, {"a", "a single byte"});
  refused(300, {"\u0120the"}, {"\u0120the", "other bytes"});
  refused(300, {"\xff<"}, {"\\xff<", "UTF-8"});
  check_bpe_options({.vocab_size = 258, .special_tokens = {"<|endoftext|>", "the"}});
}
