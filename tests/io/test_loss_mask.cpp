// Loss masks: their bits, shards that have one, and rows' targets and counts, against brute force.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "engine/rng.h"
#include "io/chat/chat_format.h"
#include "io/data/best_fit.h"
#include "io/data/loader.h"
#include "io/data/record.h"
#include "io/data/shards.h"
#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

using Tokens = std::vector<int32_t>;
using Bits = std::vector<uint8_t>;  // a byte for each token: 1 if it is learned

constexpr int32_t kEndOfText = 9;

// Random tokens with the separator kEndOfText, and a random mask in spans of some tokens.
struct Masked {
  Tokens tokens;
  Bits learned;
};
Masked random_masked(int64_t size, uint64_t mean, uint64_t stream) {
  const Philox random(17, stream);
  Masked all;
  uint64_t drawn = 0;
  for (int64_t i = 0; i < size; ++i) {
    all.tokens.push_back(random.below(drawn++, mean) == 0 ? kEndOfText : 10 + static_cast<int32_t>(i % 200));
    const bool flips = i == 0 || random.below(drawn++, 5) == 0;
    all.learned.push_back(flips ? static_cast<uint8_t>(random.below(drawn++, 2)) : all.learned.back());
  }
  return all;
}

// A folder with masked shards, at most `shard` tokens each, and a manifest that names the separator. A shard without a
// masked token is written without a mask.
class MaskedShards {
 public:
  MaskedShards(const Masked& all, int64_t shard, const std::string& position) {
    Json files = Json::array();
    const auto n = static_cast<int64_t>(all.tokens.size());
    for (int64_t begin = 0; begin < n; begin += shard) {
      const auto first = static_cast<size_t>(begin), count = static_cast<size_t>(std::min(shard, n - begin));
      const std::string name = fmt::format("train_{:06}.bin", files.size());
      const auto learned = std::span(all.learned).subspan(first, count);
      const bool masked = std::count(learned.begin(), learned.end(), 0) > 0;
      ShardWriter writer(folder_.file(name), {.width = TokenWidth::u32, .masked = masked, .vocab = 256});
      writer.append(std::span(all.tokens).subspan(first, count), masked ? learned : std::span<const uint8_t>());
      writer.finish();
      files.push_back({{"file", name}});
    }
    const Json manifest = {{"format", "llmq"},
                           {"tokenizer", "byte"},
                           {"vocab_size", 256},
                           {"eot", kEndOfText},
                           {"eot_position", position},
                           {"train", {{"shards", files}}},
                           {"val", {{"shards", Json::array()}}}};
    write_text(folder_.file("manifest.json"), manifest.dump());
  }
  DataSplit open(double val_fraction) const {
    return shard_data({.paths = {folder_.path()}, .val_paths = {}, .val_fraction = val_fraction}, 1 << 16);
  }

 private:
  TemporaryFolder folder_;
};

// Checks targets for the tokens at these positions in `all`. last: separators are documents' last tokens and have no
// target; no separator follows the end.
void check_targets(const Masked& all, const Tokens& targets, const std::vector<int64_t>& positions, bool last) {
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto at = static_cast<size_t>(positions[i]), next = at + 1;
    const bool ends = next == all.tokens.size();
    const bool excluded = last && (ends || all.tokens[at] == kEndOfText);
    const bool learned = (ends ? all.learned.back() : all.learned[next]) != 0;
    INFO("token " << at);
    CHECK(targets[i] == (learned && !excluded ? (ends ? kEndOfText : all.tokens[next]) : -1));
  }
}

std::vector<std::string> texts(const Record& record) {
  std::vector<std::string> out;
  for (const Record::Part& part : record.parts) out.push_back((part.learned ? "+" : "-") + part.text);
  return out;
}

}  // namespace

TEST_CASE("mask: bits, counts, cuts and joins are those of a list of bools", "[data]") {
  const Philox random(3, 1);
  uint64_t drawn = 0;
  LossMask mask;
  Bits expected;
  for (int64_t piece = 0; piece < 200; ++piece) {
    const int64_t n = static_cast<int64_t>(random.below(drawn++, 150));
    Bits bits;
    for (int64_t i = 0; i < n; ++i) bits.push_back(static_cast<uint8_t>(random.below(drawn++, 2)));
    if (piece % 4 == 3) std::fill(bits.begin(), bits.end(), static_cast<uint8_t>(piece % 8 == 3));
    LossMask other;
    other.append(bits);
    if (piece % 4 == 0) mask.append(bits);
    if (piece % 4 == 1) mask.append_bits(other.bits(), n);
    if (piece % 4 == 2) mask.append(other);
    if (piece % 4 == 3) mask.append(piece % 8 == 3, n);
    expected.insert(expected.end(), bits.begin(), bits.end());
    if (piece % 7 == 6) {
      expected.erase(expected.end() - static_cast<int64_t>(expected.size() / 3), expected.end());
      mask.cut(static_cast<int64_t>(expected.size()));
    }
    REQUIRE(mask.size() == static_cast<int64_t>(expected.size()));
  }
  for (int64_t i = 0; i < mask.size(); ++i) REQUIRE(mask.learned(i) == (expected[static_cast<size_t>(i)] != 0));
  for (int i = 0; i < 500; ++i) {
    const auto a = static_cast<int64_t>(random.below(drawn++, expected.size() + 1));
    const auto b = static_cast<int64_t>(random.below(drawn++, expected.size() + 1));
    REQUIRE(mask.count(std::min(a, b), std::max(a, b)) ==
            std::count(expected.begin() + std::min(a, b), expected.begin() + std::max(a, b), 1));
  }
  const std::vector<std::byte> bits = mask.bits();
  REQUIRE(bits.size() == (expected.size() + 7) / 8);
  for (size_t i = 0; i < bits.size() * 8; ++i)
    REQUIRE((std::to_integer<int>(bits[i / 8]) >> i % 8 & 1) == (i < expected.size() ? expected[i] : 0));
  check_error([&] { mask.count(0, mask.size() + 1); }, {"mask of"});
  check_error([&] { mask.append_bits(bits, static_cast<int64_t>(bits.size()) * 8 + 1); }, {"mask of"});
}

TEST_CASE("mask: rows of consecutive tokens have the targets and counts of brute force", "[data]") {
  for (const std::string position : {"first", "last"})
    for (const auto& [size, mean, T] : {std::tuple<int64_t, uint64_t, int64_t>{700, 4, 16}, {3000, 60, 33}}) {
      const Masked all = random_masked(size, mean, position == "last" ? 1 : 2);
      const MaskedShards shards(all, 401, position);
      for (const double val_fraction : {0.0, 0.3}) {
        const DataSplit split = shards.open(val_fraction);
        int64_t first = 0;  // the split's first position in `all`
        for (const auto& source : {split.train, split.val}) {
          const int64_t rows = source->size() > T ? count_sequences(*source, T) : 0;
          for (int64_t row = 0; row < rows; ++row)
            for (const bool within : {false, true}) {
              const Batch batch = validation_batch(source, T, 1, row, within);
              std::vector<int64_t> positions;
              for (int64_t i = 0; i < T; ++i) positions.push_back(first + row * T + i);
              check_targets(all, batch.targets, positions, within && position == "last");
              CHECK(count_stream_targets(*source, row * T, T, within) ==
                    T - std::count(batch.targets.begin(), batch.targets.end(), -1));
            }
          first += source->size();
        }
      }
    }
}

TEST_CASE("mask: rows of packed documents have the targets and counts of brute force", "[data]") {
  constexpr int64_t T = 64;
  for (const bool last : {false, true}) {
    Masked all = random_masked(20000, 30, last ? 5 : 6);
    for (size_t i = 0; i < all.tokens.size(); ++i)  // no empty documents, and tokens that show their position
      if (all.tokens[i] != kEndOfText || (i > 0 && all.tokens[i - 1] == kEndOfText))
        all.tokens[i] = 100 + static_cast<int32_t>(i);
    const MaskedShards shards(all, 7001, last ? "last" : "first");
    const auto source = shards.open(0).train;
    const RowOptions options = {.seq_len = T, .max_documents = 8, .seed = 3, .within = true};
    RowOptions across = options;
    across.within = false;
    const auto rows = best_fit_rows(source, options), rows_across = best_fit_rows(source, across);
    const int64_t n = measure_best_fit(*source, options).rows;
    int64_t checked = 0;
    for (int64_t k = 0; k < n; ++k) {
      Tokens tokens(T), targets(T), same_tokens(T), same_targets(T);
      Row row{tokens, targets}, same{same_tokens, same_targets};
      rows->read(k, row);
      rows_across->read(k, same);
      CHECK(same_tokens == tokens);
      CHECK(same_targets == targets);
      CHECK(rows->count_targets(k) == T - std::count(targets.begin(), targets.end(), -1));
      row.begins.push_back(T);
      for (size_t d = 0; d + 1 < row.begins.size(); ++d) {
        const auto begin = tokens.begin() + row.begins[d], end = tokens.begin() + row.begins[d + 1];
        const auto known = std::find_if(begin, end, [](int32_t token) { return token != kEndOfText; });
        if (known == end) continue;  // nothing to check: padding, or a document with only its separator left
        std::vector<int64_t> positions;
        for (auto at = begin; at != end; ++at) positions.push_back(*known - 100 + (at - known));
        check_targets(all, Tokens(targets.begin() + row.begins[d], targets.begin() + row.begins[d + 1]), positions,
                      last);
        checked += static_cast<int64_t>(positions.size());
      }
    }
    CHECK(checked > 15000);
  }
}

TEST_CASE("mask: records of JSONL, and which of their text is learned", "[data]") {
  const ChatOptions chatml{.format = std::make_shared<const ChatFormat>(ChatFormat::chatml(Json::object()))};
  const auto parse = [&](const std::string& line) { return parse_record(line, "a.jsonl: line 3", chatml); };
  const std::string kHeader = "<|im_start|>assistant\n", kUser = "<|im_start|>user\nU<|im_end|>\n";
  const Record plain = parse(R"({"text": "ab", "prompt": 7})");
  CHECK(texts(plain) == std::vector<std::string>{"+ab"});
  CHECK(!plain.masked);
  CHECK(parse(R"({"text": ""})").empty());
  const Record pair = parse(R"({"prompt": "ab", "completion": "c", "id": 1})");
  CHECK(texts(pair) == std::vector<std::string>{"-ab", "+c"});
  CHECK(pair.masked);
  CHECK(parse(R"({"prompt": "", "completion": ""})").empty());
  const Record chat = parse(R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U\nV"},)"
                            R"({"role": "assistant", "content": "A"}, {"role": "user", "content": ""},)"
                            R"({"role": "assistant", "content": "B"}]})");
  CHECK(texts(chat) ==
        std::vector<std::string>{"-<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU\nV<|im_end|>\n" + kHeader,
                                 "+A<|im_end|>", "-\n<|im_start|>user\n<|im_end|>\n" + kHeader, "+B<|im_end|>", "-\n"});
  CHECK(chat.masked);
  CHECK(chat.chat);
  // Keys that are not used may hold anything that other programs write.
  for (const char* other : {"NaN", "Infinity", "-Infinity", "1e400", "-1e999", R"("\\ud800")", "\"\\x\xff\"",
                            R"({"a": [NaN, {"b": -Infinity, "c": "\\udc00"}]})"}) {
    INFO(other);
    CHECK(texts(parse(fmt::format(R"({{"other": {0}, "text": "NaN", "more": {0}}})", other))) ==
          std::vector<std::string>{"+NaN"});
  }
  for (const char* nothing : {"null", "NaN", "[]", "{}", "\"\"", "false"})
    CHECK(
        texts(parse(fmt::format(
            R"({{"tools": {0}, "loss_mask": {0}, "messages": [{{"role": "assistant", "content": "A", "tool_calls": {0}}}]}})",
            nothing))) == std::vector<std::string>{"-" + kHeader, "+A<|im_end|>", "-\n"});
  // A message's weight.
  const auto message_with = [&](const std::string& keys) {
    return parse(R"({"messages": [{"role": "assistant", "content": "A", )" + keys +
                 R"(}, {"role": "user", "content": "U", "weight": 0}]})");
  };
  for (const char* keys :
       {R"("weight": 0)", R"("weight": 0.0)", R"("train": false)", R"("loss": false)", R"("weight": false)"}) {
    INFO(keys);
    CHECK(texts(message_with(keys)) == std::vector<std::string>{"-" + kHeader + "A<|im_end|>\n" + kUser});
  }
  for (const char* keys : {R"("weight": 1)", R"("weight": 1.0)", R"("train": true)", R"("weight": null)"}) {
    INFO(keys);
    CHECK(texts(message_with(keys)) == std::vector<std::string>{"-" + kHeader, "+A<|im_end|>", "-\n" + kUser});
  }
  CHECK(texts(parse(R"({"text": "a", "weight": 1, "sample_weight": 1.0, "label": 0})")) ==
        std::vector<std::string>{"+a"});
  const auto bad = [&](const std::string& line, std::vector<std::string> words) {
    words.insert(words.begin(), "a.jsonl: line 3");
    check_error([&] { parse(line); }, words);
  };
  bad("{\"text\": ", {"parse error"});
  bad("[1]", {"JSON object", "`messages`"});
  bad(R"({"text": "a"})" + std::string(1, '\0') + "more", {"a NUL byte"});
  bad(R"({"text": 7})", {"string `text`"});
  bad(R"({"text": NaN})", {"string `text`"});
  bad("{\"text\": \"\xff\", \"other\": NaN}", {"UTF-8"});
  bad(R"({"text": "\ud800", "other": NaN})", {"surrogate"});
  bad(R"({"text": "a", "other": NaNs})", {"parse error"});
  bad(R"({"text": "a", "other": NaN)", {"parse error"});
  bad(R"({"text": "a", "weight": 0})", {"`weight` is 0"});
  bad(R"({"text": "a", "weight": 0.5})", {"`weight` is 0.5"});
  bad(R"({"text": "a", "weight": Infinity})", {"`weight` is -1"});
  bad(R"({"messages": [{"role": "assistant", "content": "A", "weight": 1e400}]})", {"`weight` is -1"});
  bad(R"({"prompt": "a", "completion": "b", "loss": false})", {"`loss` is false"});
  bad(R"({"text": "a", "loss_mask": [0, 1]})", {"`loss_mask` is array", "what is learned"});
  bad(R"({"prompt": "a", "completion": "b", "label": false})", {"`label` is false"});
  bad(R"({"prompt": "a", "completion": "b", "suffix": "c"})", {"`suffix` is \"c\""});
  for (const char* key : {"tools", "functions", "system", "images", "sample_weight"})
    bad(fmt::format(R"({{"{}": ["x"], "messages": [{{"role": "user", "content": "U"}}]}})", key),
        {fmt::format("`{}`", key)});
  for (const char* key : {"function_call", "images", "loss_scale", "train_detail"})
    bad(fmt::format(R"({{"messages": [{{"role": "assistant", "content": "A", "{}": [{{}}]}}]}})", key),
        {"message 1", fmt::format("`{}`", key), "not supported"});
  for (const char* weight : {"0.5", "2", "-1", "\"0\"", "[0]"})
    bad(fmt::format(R"({{"messages": [{{"role": "assistant", "content": "A", "weight": {}}}]}})", weight),
        {"message 1", "`weight`", "0, 1, false or true"});
  bad(R"({"messages": [{"role": "user", "content": "U", "weight": 1}]})",
      {"`weight` is true", "\"user\"", "assistant"});
  bad(R"({"messages": [{"role": "assistant", "content": "A", "weight": 1, "train": false}]})", {"opposite"});
  bad(R"({"prompt": "a"})", {"`completion` is missing"});
  bad(R"({"completion": "a"})", {"`prompt` is missing"});
  bad(R"({"prompt": ["a"], "completion": "b"})", {"`prompt` is array", "string"});
  bad(R"({"prompt": "a", "completion": null})", {"`completion` is null"});
  bad(R"({"prompt": "a", "messages": []})", {"both"});
  bad(R"({"messages": []})", {"`messages` is an empty list"});
  bad(R"({"messages": {"role": "user"}})", {"`messages` is object", "list"});
  bad(R"({"messages": [{"role": "user", "content": "x"}, "y"]})", {"message 2 is \"y\""});
  const std::string deep(100'000, '[');
  bad("{\"messages\": [" + deep + std::string(deep.size(), ']') + "]}", {"message 1 is array"});
  bad(R"({"messages": [{"content": "x"}]})", {"message 1", "`role` is missing"});
  bad(R"({"messages": [{"role": "a\nb", "content": "x"}]})", {"message 1", "`role`", "one line"});
  bad(R"({"messages": [{"role": "", "content": "x"}]})", {"message 1", "`role`"});
  bad(R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})", {"ChatML", "`content`", "string"});
  bad(R"({"messages": [{"role": "user", "content": "x", "id": 10000000000000000000000}]})", {"more than 64 bits"});
  bad(R"({"prompt": "a", "completion": "b", "tools": [{}]})", {"`tools`"});
}

TEST_CASE("mask: JSONL as text, by document into both splits, keeps each document's mask", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.jsonl"),
             "{\"text\":\"ab\"}\n{\"prompt\":\"cd\",\"completion\":\"e\"}\n\n"
             "{\"messages\":[{\"role\":\"user\",\"content\":\"f\"}]}\n{\"text\":\"g\"}\n");
  const auto tokenizer = make_tokenizer("byte");
  const auto open = [&](double val_fraction, uint64_t seed) {
    return text_data({.paths = {folder.file("a.jsonl")}, .val_paths = {}, .val_fraction = val_fraction, .seed = seed},
                     *tokenizer);
  };
  const auto text_of = [](const TokenSource& source) {  // learned tokens as they are, others in brackets
    Tokens tokens(static_cast<size_t>(source.size()));
    source.read(0, tokens);
    std::string text;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const char token = tokens[i] == 0 ? '|' : tokens[i] == '\n' ? '/' : static_cast<char>(tokens[i]);
      text += source.mask().learned(static_cast<int64_t>(i)) ? std::string(1, token) : fmt::format("[{}]", token);
    }
    return text;
  };
  std::string chat;
  for (const char c : std::string("<|im_start|>user/f<|im_end|>/")) chat += fmt::format("[{}]", c);
  // A separator is learned if the token before it is.
  const auto whole = open(0, 0).train;
  CHECK(text_of(*whole) == "|ab|[c][d]e|" + chat + "[|]g");
  CHECK(whole->documents()->after_end == 0);
  bool val_of_each[4] = {};
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const DataSplit split = open(0.25, seed);
    const std::string train = text_of(*split.train), val = text_of(*split.val);
    const std::string documents[] = {"ab", "[c][d]e", chat, "g"};
    for (int i = 0; i < 4; ++i) {
      val_of_each[i] |= val == "|" + documents[i];
      if (val != "|" + documents[i]) CHECK(has(train, documents[i]));
    }
    CHECK(split.val->documents()->after_end == (val.ends_with(']') ? -1 : 0));
    CHECK(has(train, "[/]g") == false);
  }
  CHECK(std::count(std::begin(val_of_each), std::end(val_of_each), true) == 4);
  write_text(folder.file("b.jsonl"), "{\"text\":\"ab\"}\n\n{\"prompt\":\"cd\"}\n");
  check_error([&] { text_data({.paths = {folder.file("b.jsonl")}, .val_paths = {}}, *tokenizer); },
              {"b.jsonl: line 3, at offset 15", "`completion` is missing"});
}
