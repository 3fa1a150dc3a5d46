// Data: the shuffle is a bijection, splits never overlap, ranks share a step without gap or overlap, a resume continues
// at the exact sequence, and the loader reads what `triad data` writes.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#include "engine/check.h"
#include "io/data/loader.h"
#include "io/data/permutation.h"
#include "io/data/shards.h"
#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using triad::test::read_text;
using triad::test::run_program;
using triad::test::TemporaryFolder;
using triad::test::write_text;

namespace {

// A source in which token i has the value i, so that a batch shows which sequences it holds.
class CountingTokens final : public TokenSource {
 public:
  explicit CountingTokens(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  void read(int64_t begin, std::span<int32_t> out) const override {
    if (begin == fails_at) fail("the disk is gone");
    std::iota(out.begin(), out.end(), static_cast<int32_t>(begin));
  }
  std::string name() const override { return "counting tokens"; }
  int64_t fails_at = -1;

 private:
  int64_t size_;
};

std::vector<int32_t> all_tokens(const TokenSource& source) {
  std::vector<int32_t> tokens(static_cast<size_t>(source.size()));
  source.read(0, tokens);
  return tokens;
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) { return e.what(); }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Sequence numbers in the next n batches, in order.
std::vector<int64_t> take(Loader& loader, int64_t n, int64_t seq_len) {
  std::vector<int64_t> sequences;
  for (int64_t i = 0; i < n; ++i) {
    const Batch batch = loader.next();
    for (int64_t row = 0; row < batch.rows; ++row)
      sequences.push_back(batch.tokens[static_cast<size_t>(row * seq_len)] / seq_len);
  }
  return sequences;
}

void write_shard(const std::string& path, int32_t first, int32_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  ShardWriter writer(path, TokenWidth::u16);
  writer.append(tokens);
  writer.finish();
}

}  // namespace

TEST_CASE("data: the shuffle is a bijection of any size, and its own for each seed and epoch", "[data]") {
  for (const int64_t n : {1, 2, 3, 4, 5, 7, 16, 17, 100, 255, 256, 257, 1000, 65537}) {
    std::vector<bool> seen(static_cast<size_t>(n), false);
    const Permutation permutation(n, 42, 3);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t j = permutation(i);
      REQUIRE((j >= 0 && j < n));
      REQUIRE(!seen[static_cast<size_t>(j)]);
      seen[static_cast<size_t>(j)] = true;
    }
  }
  const auto fixed_points = [](const Permutation& a, const auto& b, int64_t n) {
    int64_t same = 0;
    for (int64_t i = 0; i < n; ++i) same += a(i) == b(i);
    return same;
  };
  constexpr int64_t kSize = 10007;  // two independent shuffles agree at about one position
  const Permutation one(kSize, 1, 0);
  CHECK(fixed_points(
            one, [](int64_t i) { return i; }, kSize) < 12);
  CHECK(fixed_points(one, Permutation(kSize, 2, 0), kSize) < 12);
  CHECK(fixed_points(one, Permutation(kSize, 1, 1), kSize) < 12);
  CHECK(fixed_points(one, Permutation(kSize, 1, 0), kSize) == kSize);
  const int64_t huge = int64_t{1} << 61;
  CHECK((Permutation(huge, 1, 0)(huge - 1) >= 0 && Permutation(huge, 1, 0)(huge - 1) < huge));
  // Small permutations are uniform: each of 24 orders occurs about equally often.
  std::map<std::vector<int64_t>, int> orders;
  for (uint64_t seed = 0; seed < 2400; ++seed) {
    const Permutation p(4, seed, 0);
    ++orders[{p(0), p(1), p(2), p(3)}];
  }
  CHECK(orders.size() == 24);
  for (const auto& [order, count] : orders) CHECK((count > 50 && count < 160));
}

TEST_CASE("data: sequences cover the source, targets are one further on", "[data]") {
  constexpr int64_t T = 5;
  const auto source = std::make_shared<CountingTokens>(11 * T + 4);  // 11 sequences; the last 3 tokens are in none
  CHECK(count_sequences(*source, T) == 11);
  CHECK(count_sequences(CountingTokens(11 * T + 1), T) == 11);
  CHECK(count_sequences(CountingTokens(11 * T), T) == 10);
  const std::string error = error_of([] { count_sequences(CountingTokens(5), 5); });
  CHECK((contains(error, "counting tokens has 5") && contains(error, "needs 6")));
  Loader loader(source, {.seq_len = T, .micro_batch = 2, .seed = 1});
  const Batch batch = loader.next();
  CHECK(batch.rows == 2);
  REQUIRE(batch.tokens.size() == 2 * T);
  for (size_t i = 0; i < batch.tokens.size(); ++i) CHECK(batch.targets[i] == batch.tokens[i] + 1);
  // Each epoch contains every sequence once, in another order.
  Loader epochs(source, {.seq_len = T, .micro_batch = 1, .seed = 1});
  const std::vector<int64_t> first = take(epochs, 11, T), second = take(epochs, 11, T);
  CHECK(std::set<int64_t>(first.begin(), first.end()).size() == 11);
  CHECK(std::set<int64_t>(second.begin(), second.end()).size() == 11);
  CHECK(first != second);
}

TEST_CASE("data: a step's sequences depend on seed and step alone, whatever the ranks", "[data]") {
  constexpr int64_t T = 3, kStep = 12, kSteps = 4;
  const auto source = std::make_shared<CountingTokens>(100 * T + 1);
  std::vector<int64_t> whole;
  {
    Loader loader(source, {.seq_len = T, .micro_batch = kStep, .seed = 9});
    whole = take(loader, kSteps, T);
  }
  for (const auto& [world, micro_steps] : {std::pair<int64_t, int64_t>{1, 4}, {2, 1}, {2, 3}, {3, 2}, {4, 3}, {6, 1}}) {
    std::vector<std::vector<int64_t>> by_rank;
    for (int64_t rank = 0; rank < world; ++rank) {
      Loader loader(source, {.seq_len = T,
                             .micro_batch = kStep / world / micro_steps,
                             .micro_steps = micro_steps,
                             .seed = 9,
                             .rank = rank,
                             .world = world});
      by_rank.push_back(take(loader, kSteps * micro_steps, T));
      CHECK(loader.cursor() == kSteps * kStep);
    }
    std::vector<int64_t> joined;  // sequences by step, then by rank: disjoint, complete, in order
    for (int64_t step = 0; step < kSteps; ++step)
      for (const std::vector<int64_t>& part : by_rank)
        joined.insert(joined.end(), part.begin() + step * kStep / world, part.begin() + (step + 1) * kStep / world);
    CHECK(joined == whole);
  }
}

TEST_CASE("data: all ranks together take each sequence once an epoch, where epochs end within steps too", "[data]") {
  constexpr int64_t T = 3, kSequences = 10, kMicroBatch = 2, kSteps = 10;
  const auto source = std::make_shared<CountingTokens>(kSequences * T + 1);
  for (const int64_t world : {1, 2, 3, 7}) {  // more than an epoch per step with 7 ranks
    INFO(world << " ranks");
    std::vector<std::vector<int64_t>> by_rank;
    for (int64_t rank = 0; rank < world; ++rank) {
      Loader loader(source, {.seq_len = T, .micro_batch = kMicroBatch, .seed = 2, .rank = rank, .world = world});
      by_rank.push_back(take(loader, kSteps, T));
    }
    std::vector<int64_t> order;  // sequences by step, then by rank
    for (int64_t step = 0; step < kSteps; ++step)
      for (const std::vector<int64_t>& part : by_rank)
        order.insert(order.end(), part.begin() + step * kMicroBatch, part.begin() + (step + 1) * kMicroBatch);
    for (auto epoch = order.begin(); order.end() - epoch >= kSequences; epoch += kSequences)
      CHECK(std::set<int64_t>(epoch, epoch + kSequences).size() == kSequences);
  }
}

TEST_CASE("data: a resume goes on where an unbroken run would", "[data]") {
  constexpr int64_t T = 4;
  const auto source = std::make_shared<CountingTokens>(10 * T + 1);  // epochs end within batches
  const LoaderOptions options{.seq_len = T, .micro_batch = 3, .micro_steps = 2, .seed = 5};
  Loader unbroken(source, options);
  const std::vector<int64_t> all = take(unbroken, 14, T);
  for (int64_t steps = 0; steps <= 6; ++steps) {
    Loader before(source, options);
    std::vector<int64_t> joined = take(before, steps * 2, T);
    LoaderOptions after = options;
    after.first_sequence = before.cursor();
    Loader resumed(source, after);
    const std::vector<int64_t> rest = take(resumed, 14 - steps * 2, T);
    joined.insert(joined.end(), rest.begin(), rest.end());
    CHECK(joined == all);
    CHECK(resumed.cursor() == unbroken.cursor());
  }
}

TEST_CASE("data: a resume is exact in the third file of the second epoch", "[data]") {
  constexpr int64_t T = 4;
  const TemporaryFolder folder;
  write_shard(folder.file("a.bin"), 0, 37);
  write_shard(folder.file("b.bin"), 37, 30);
  write_shard(folder.file("c.bin"), 67, 42);  // contains sequences 16 (its first token is in b.bin) to 26
  const auto source = shard_data({.paths = {folder.file("?.bin")}, .val_paths = {}, .val_fraction = 0}, 1000).train;
  const int64_t n = count_sequences(*source, T);
  REQUIRE(n == 27);
  const LoaderOptions options{.seq_len = T, .micro_batch = 1, .seed = 5};
  Loader unbroken(source, options);
  const std::vector<int64_t> all = take(unbroken, 3 * n, T);
  int resumes = 0;
  for (int64_t k = n; k < 2 * n; ++k) {
    if (all[static_cast<size_t>(k)] < 17) continue;
    ++resumes;
    Loader before(source, options);
    take(before, k, T);
    LoaderOptions after = options;
    after.first_sequence = before.cursor();
    Loader resumed(source, after);
    const std::vector<int64_t> rest = take(resumed, 3 * n - k, T);
    CHECK(std::equal(rest.begin(), rest.end(), all.begin() + k, all.end()));
  }
  CHECK(resumes == 10);
}

TEST_CASE("data: a read that hangs ends the wait, with what hangs", "[data]") {
  class Hanging final : public TokenSource {
   public:
    int64_t size() const override { return 100; }
    void read(int64_t begin, std::span<int32_t> out) const override {
      std::fill(out.begin(), out.end(), 1);
      hangs = hangs || begin == hangs_at;
      while (begin == hangs_at && !let_go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      came_back = came_back || begin == hangs_at;
    }
    std::string name() const override { return "a dead file system"; }
    int64_t hangs_at = -1;
    std::atomic<bool> let_go = false;
    mutable std::atomic<bool> hangs = false, came_back = false;
  };
  const auto source = std::make_shared<Hanging>();
  source->hangs_at = sequence_position(1, 24, 3) * 4;
  {
    Loader loader(source, {.seq_len = 4, .micro_batch = 1, .seed = 3, .stall_s = 0.2});
    while (!source->hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // waits until batch 1 is read
    CHECK_NOTHROW(loader.next());
    const std::string error = error_of([&] { loader.next(); });
    INFO(error);
    CHECK((contains(error, "a dead file system") && contains(error, "batch 1") && contains(error, "0.2 s")));
  }  // the destructor does not wait for the hanging thread
  source->hangs = false;
  {
    const Loader loader(source, {.seq_len = 4, .micro_batch = 1, .seed = 3});
    while (!source->hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }  // the destructor does not wait either if next() was never called
  CHECK(!source->came_back);
  source->let_go = true;  // the thread ends later; the loader's destruction freed nothing that it uses
  while (!source->came_back) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST_CASE("data: a process that was suspended while it waited has not waited all that time", "[data][slow]") {
  class Slow final : public TokenSource {
   public:
    int64_t size() const override { return 100; }
    void read(int64_t, std::span<int32_t> out) const override {
      for (int i = 0; i < 20; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      std::fill(out.begin(), out.end(), 1);
    }
    std::string name() const override { return "a slow disk"; }
  };
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    try {
      Loader loader(std::make_shared<Slow>(), {.seq_len = 4, .micro_batch = 1, .stall_s = 6});
      loader.next();
    } catch (const std::exception&) { _exit(1); }
    _exit(0);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  kill(child, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(6500));
  kill(child, SIGCONT);
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("data: what the reading thread throws arrives at the caller", "[data]") {
  auto source = std::make_shared<CountingTokens>(21);
  source->fails_at = sequence_position(3, 5, 0) * 4;
  Loader loader(source, {.seq_len = 4, .micro_batch = 1, .prefetch = 2});
  for (int i = 0; i < 3; ++i) CHECK_NOTHROW(loader.next());
  CHECK_THROWS_WITH(loader.next(), "the disk is gone");
  CHECK_THROWS_WITH(loader.next(), "the disk is gone");
  CHECK_THROWS_AS(Loader(source, {.seq_len = 4, .micro_batch = 1, .rank = 2, .world = 2}), Error);
  CHECK_THROWS_AS(Loader(source, {.seq_len = 40, .micro_batch = 1}), Error);
}

TEST_CASE("data: validation batches are the same first ones every time", "[data]") {
  const auto source = std::make_shared<CountingTokens>(7 * 4 + 1);
  CHECK(count_validation_batches(source, 4, 3, 1'000'000'000) == 3);
  CHECK(count_validation_batches(source, 4, 3, 2) == 2);
  CHECK(count_validation_batches(source, 4, 7, 2) == 1);
  CHECK(validation_batch(source, 4, 3, 0).tokens[0] == 0);
  CHECK(validation_batch(source, 4, 3, 1).tokens[0] == 12);
  CHECK(validation_batch(source, 4, 3, 1).rows == 3);
  const Batch last = validation_batch(source, 4, 3, 2);
  CHECK(last.rows == 1);
  CHECK(last.tokens.size() == 12);
  CHECK(last.targets[3] == 28);
  CHECK(std::count(last.targets.begin(), last.targets.end(), -1) == 8);
  CHECK_THROWS_AS(count_validation_batches(source, 29, 1, 1), Error);
}

TEST_CASE("data: synthetic tokens are uniform, endless and a function of seed, split and position", "[data]") {
  const DataSplit a = synthetic_data(10, 1, 0.1), b = synthetic_data(10, 1, 0.1), c = synthetic_data(10, 2, 0);
  std::vector<int32_t> x(10000), y(10000), later(100);
  a.train->read(0, x);
  b.train->read(0, y);
  CHECK(x == y);
  b.train->read(500, later);
  CHECK(std::equal(later.begin(), later.end(), x.begin() + 500));
  a.val->read(0, y);
  CHECK(x != y);
  c.train->read(0, y);
  CHECK(x != y);
  for (int32_t token = 0; token < 10; ++token) {
    const auto count = std::count(x.begin(), x.end(), token);
    CHECK((count > 850 && count < 1150));
  }
  CHECK(count_sequences(*a.train, 65536) > int64_t{1} << 40);
  CHECK(c.val->size() == 0);
}

TEST_CASE("data: text is split by document, a single one by position", "[data]") {
  const TemporaryFolder folder;
  for (int i = 0; i < 20; ++i)
    write_text(folder.file("d" + std::to_string(100 + i) + ".txt"), std::string(30, static_cast<char>('A' + i)));
  write_text(folder.file("d000.txt"), "");  // an empty document adds no tokens
  const SplitOptions options{.paths = {folder.file("*.txt")}, .val_paths = {}, .val_fraction = 0.2, .seed = 3};
  const ByteTokenizer tokenizer;
  const DataSplit split = text_data(options, tokenizer);
  const std::vector<int32_t> train = all_tokens(*split.train), val = all_tokens(*split.val);
  CHECK(train.size() == 16 * 31);
  CHECK(val.size() == 4 * 31);
  std::set<int32_t> documents;
  for (const std::vector<int32_t>* tokens : {&train, &val})
    for (size_t i = 0; i < tokens->size(); i += 31) {
      CHECK((*tokens)[i] == 0);  // the end-of-text token before each document
      CHECK(documents.insert((*tokens)[i + 1]).second);
      CHECK(std::count(tokens->begin() + static_cast<int64_t>(i) + 1, tokens->begin() + static_cast<int64_t>(i) + 31,
                       (*tokens)[i + 1]) == 30);
    }
  CHECK(documents.size() == 20);
  CHECK(all_tokens(*text_data(options, tokenizer).val) == val);
  SplitOptions other = options;
  other.seed = 4;
  CHECK(all_tokens(*text_data(other, tokenizer).val) != val);
  other.val_fraction = 0;
  CHECK(text_data(other, tokenizer).val->size() == 0);
  CHECK(text_data(other, tokenizer).train->size() == 20 * 31);
  other.val_fraction = 0.001;  // a fraction above 0 holds out at least one document
  CHECK(text_data(other, tokenizer).val->size() == 31);
  other.paths = {folder.file("d10*.txt")};
  other.val_paths = {folder.file("d11*.txt")};
  CHECK(text_data(other, tokenizer).val->size() == 310);
  other.val_paths = {folder.file("d105.txt")};
  CHECK(contains(error_of([&] { text_data(other, tokenizer); }), "d105.txt"));

  other.paths = {folder.file("d100.txt")};
  other.val_paths.clear();
  other.val_fraction = 0.25;
  write_text(folder.file("d100.txt"), "abcdefghijk");
  const DataSplit one = text_data(other, tokenizer);
  CHECK(tokenizer.decode(all_tokens(*one.train)) == std::string("\0abcdefgh", 9));
  CHECK(tokenizer.decode(all_tokens(*one.val)) == "ijk");

  other.paths = {folder.file("d000.txt")};
  CHECK(contains(error_of([&] { text_data(other, tokenizer); }), "d000.txt"));
  other.paths = {};
  CHECK_THROWS_AS(text_data(other, tokenizer), UsageError);
}

TEST_CASE("data: shards are one row of tokens, whose end is for validation", "[data]") {
  const TemporaryFolder folder;
  write_shard(folder.file("a.bin"), 0, 40);
  write_shard(folder.file("b.bin"), 40, 1);
  write_shard(folder.file("c.bin"), 41, 59);
  SplitOptions options{.paths = {folder.file("?.bin")}, .val_paths = {}, .val_fraction = 0.3};
  const DataSplit split = shard_data(options, 100);
  std::vector<int32_t> train = all_tokens(*split.train), val = all_tokens(*split.val);
  REQUIRE(train.size() == 70);
  REQUIRE(val.size() == 30);
  for (int32_t i = 0; i < 100; ++i)
    CHECK((i < 70 ? train[static_cast<size_t>(i)] : val[static_cast<size_t>(i - 70)]) == i);
  std::vector<int32_t> across(4);
  split.train->read(39, across);
  CHECK(across == std::vector<int32_t>{39, 40, 41, 42});
  CHECK_THROWS_AS(split.train->read(97, across), Error);
  CHECK_THROWS_AS(split.train->read(68, across), Error);  // two tokens (of four) are held out for validation
  CHECK_THROWS_AS(split.train->read(INT64_MAX, across), Error);
  CHECK_THROWS_AS(split.val->read(-1, across), Error);
  const std::string error = error_of([&] { shard_data(options, 70); });
  CHECK((contains(error, "c.bin") && contains(error, "token 70") && contains(error, "offset 1082")));
  options.val_paths = {folder.file("c.bin")};
  CHECK(contains(error_of([&] { shard_data(options, 100); }), "c.bin"));
  options.paths = {folder.file("[ab].bin")};
  CHECK(shard_data(options, 100).val->size() == 59);
  CHECK(shard_data(options, 100).train->size() == 41);

  const ByteTokenizer tokenizer;
  write_text(folder.file("t.txt"), "text");
  CHECK(open_tokens({folder.file("?.bin")}, tokenizer, 100)->size() == 100);
  CHECK(open_tokens({folder.file("t.txt")}, tokenizer, 256)->size() == 5);
  CHECK(contains(error_of([&] { open_tokens({folder.file("?.*")}, tokenizer, 256); }), "one kind"));
  CHECK(contains(error_of([&] { open_tokens({folder.file("t.txt")}, tokenizer, 100); }), "vocabulary"));
}

TEST_CASE("data: triad data writes shards that the loader reads", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.txt"), "first document");
  write_text(folder.file("b.jsonl"),
             "{\"text\":\"second\"}\n\n{\"id\":3,\"text\":\"third \\u00e9\"}\n{\"text\":\"fourth\"}");
  const std::string input = "data --input '" + folder.file("?.*") + "' --out ", out = folder.file("out");
  REQUIRE(run_program(input + out + " --val-fraction 0.25 --shard-tokens 11 --seed 7").exit_code == 0);
  const Json manifest = Json::parse(read_text(out + "/manifest.json"));
  CHECK(manifest["documents"] == 4);
  CHECK(manifest["val"]["documents"] == 1);
  std::string text;
  int64_t tokens = 0;
  const ByteTokenizer tokenizer;
  for (const char* split : {"train", "val"}) {
    int64_t in_split = 0;
    for (const Json& shard : manifest[split]["shards"]) {
      const std::string path = out + "/" + shard["file"].get<std::string>();
      CHECK(Shard(path).size() == shard["tokens"]);
      in_split += Shard(path).size();
      text += tokenizer.decode(all_tokens(*open_tokens({path}, tokenizer, 256)));
    }
    CHECK(in_split == manifest[split]["tokens"]);
    tokens += in_split;
  }
  CHECK(tokens == 4 + 14 + 6 + 8 + 6);
  for (const char* document : {"first document", "second", "third \xc3\xa9", "fourth"})
    CHECK(contains(text, std::string(1, '\0') + document));
  CHECK(manifest["train"]["shards"][0]["file"] == "train_000000.bin");
  CHECK(manifest["val"]["shards"][0]["file"] == "val_000000.bin");

  const auto refused = [&](const std::string& args, int exit_code, const std::string& says) {
    const test::Outcome outcome = run_program(args);
    INFO(args << "\n" << outcome.output);
    CHECK(outcome.exit_code == exit_code);
    CHECK(contains(outcome.output, says));
  };
  refused(input + out, 1, "already holds");
  refused(input + folder.file("x") + " --tokenizer gpt5", 2, "gpt5");
  refused(input + folder.file("x") + " --val-fraction 1.5", 2, "--val-fraction");
  refused(input + folder.file("x") + " --shard-tokens 0", 2, "--shard-tokens");
  write_text(folder.file("c.jsonl"), "{\"text\":\"fine\"}\n{\"text\":");
  const std::string c = "data --input " + folder.file("c.jsonl") + " --out ";
  refused(c + folder.file("x"), 1, "c.jsonl: line 2, at offset 16");
  write_text(folder.file("c.jsonl"), "{\"body\":\"no text\"}");
  refused(c + folder.file("x"), 1, "c.jsonl: line 1, at offset 0");
  CHECK(!std::filesystem::exists(folder.file("x")));
}
