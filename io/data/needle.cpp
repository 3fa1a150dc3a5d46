#include "io/data/needle.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "engine/check.h"
#include "engine/random_streams.h"
#include "engine/rng.h"

namespace triad {

namespace {

// A sequence of random numbers.
class Draws {
 public:
  Draws(uint64_t seed, uint64_t stream) : random_(seed, stream) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_.below(next_++, static_cast<uint64_t>(n))); }

 private:
  Philox random_;
  uint64_t next_ = 0;
};

int32_t draw_hay(const NeedleTask& task, Draws& draws) {
  return static_cast<int32_t>(task.first_hay() + draws.below(task.vocab - task.first_hay()));
}

// Returns n distinct random keys.
std::vector<int32_t> draw_keys(const NeedleTask& task, int64_t n, Draws& draws) {
  std::vector<int32_t> keys(static_cast<size_t>(task.kinds()));
  std::iota(keys.begin(), keys.end(), 1);
  for (int64_t i = 0; i < n; ++i) std::swap(keys[i], keys[i + draws.below(task.kinds() - i)]);
  keys.resize(static_cast<size_t>(n));
  return keys;
}

std::vector<int32_t> draw_value(const NeedleTask& task, Draws& draws) {
  std::vector<int32_t> value(static_cast<size_t>(task.value_tokens));
  for (int32_t& token : value) token = static_cast<int32_t>(task.first_value() + draws.below(task.kinds()));
  return value;
}

void put_pair(std::span<int32_t> tokens, int64_t at, int32_t key, std::span<const int32_t> value) {
  tokens[at] = key;
  std::copy(value.begin(), value.end(), tokens.begin() + at + 1);
}

// Records which positions of a sequence are occupied by pairs.
class Occupied {
 public:
  Occupied(int64_t length, int64_t width) : occupied_(static_cast<size_t>(length), false), width_(width) {}
  bool free(int64_t at) const {
    const auto from = occupied_.begin() + at;
    return std::find(from, from + width_, true) == from + width_;
  }
  void mark(int64_t at) { std::fill_n(occupied_.begin() + at, width_, true); }
  // A random position in 1 .. last at which a pair fits: the first one in cyclic order from a random start; 0 if there
  // is none.
  int64_t find(int64_t last, Draws& draws) const {
    const int64_t from = draws.below(last);
    for (int64_t step = 0; step < last; ++step)
      if (const int64_t at = 1 + (from + step) % last; free(at)) return at;
    return 0;
  }

 private:
  std::vector<bool> occupied_;
  int64_t width_;
};

// A random position at which a pair fits: uniform, or at a log-uniform distance from `other`, the previous position of
// the same key (0: there is none).
int64_t draw_place(const Occupied& occupied, int64_t other, int64_t last, Draws& draws) {
  // Number of random draws before a search; few are needed while at most half of the positions are occupied.
  constexpr int kTries = 64;
  for (int i = 0; i < kTries; ++i) {
    const int64_t octave = int64_t{1} << draws.below(std::bit_width(static_cast<uint64_t>(last)));
    const int64_t distance = octave + draws.below(octave), side = draws.below(2) == 0 ? 1 : -1;
    const int64_t at = other == 0 || draws.below(2) == 0 ? 1 + draws.below(last) : other + side * distance;
    if (at >= 1 && at <= last && occupied.free(at)) return at;
  }
  return occupied.find(last, draws);
}

// Writes a training or validation sequence with all its pairs and questions.
void write_recall(const NeedleTask& task, Draws draws, std::span<int32_t> tokens, std::span<int32_t> targets) {
  const int64_t width = 1 + task.value_tokens, last = task.seq_len - width;
  for (int32_t& token : tokens) token = draw_hay(task, draws);
  tokens[0] = 0;
  std::fill(targets.begin(), targets.end(), -1);
  Occupied occupied(task.seq_len, width);
  const std::vector<int32_t> keys = draw_keys(task, task.pairs, draws);
  for (int64_t k = 0; k < task.pairs; ++k) {
    // Every second key has one question, and its neighbour has twice the mean number less one. So some answers are far
    // from any other occurrence of their key.
    const bool once = k % 2 == 0 && k + 1 < task.pairs, twice = k % 2 == 1;
    const int64_t questions = once ? 1 : twice ? 2 * task.questions - 1 : task.questions;
    std::vector<int64_t> places;
    for (int64_t i = 0; i <= questions; ++i) {
      places.push_back(draw_place(occupied, i == 0 ? 0 : places.back(), last, draws));
      occupied.mark(places.back());
    }
    const int64_t needle = *std::min_element(places.begin(), places.end());
    const std::vector<int32_t> value = draw_value(task, draws);
    for (const int64_t at : places) {
      put_pair(tokens, at, keys[k], value);
      if (at != needle) std::copy(value.begin(), value.end(), targets.begin() + at);
    }
  }
}

void check_length(const NeedleTask& task, int64_t length) {
  const int64_t needed = 2 + 2 * task.value_tokens;
  if (length < needed)
    fail_usage("a needle of {} value tokens and its question need {} tokens: a length of {} has no room for them",
               task.value_tokens, needed, length);
}

NeedleProbe make_probe(const NeedleTask& task, int64_t length, double depth, Draws draws) {
  check_length(task, length);
  if (!(depth >= 0 && depth <= 1)) fail_usage("a needle's depth is {}: a number in [0, 1] is needed", depth);
  const int64_t width = 1 + task.value_tokens, question = length - task.value_tokens;
  const int64_t last = question - width;  // the last position at which a pair may begin; the first is 1
  NeedleProbe probe{.tokens = std::vector<int32_t>(static_cast<size_t>(length)),
                    .targets = std::vector<int32_t>(static_cast<size_t>(length), -1),
                    .needle = 1 + std::llround(depth * static_cast<double>(last - 1))};
  for (int32_t& token : probe.tokens) token = draw_hay(task, draws);
  probe.tokens[0] = 0;
  const auto others = static_cast<int64_t>(static_cast<double>(task.pairs - 1) * static_cast<double>(length) /
                                           static_cast<double>(task.seq_len));
  const std::vector<int32_t> keys = draw_keys(task, 1 + std::min(others, task.kinds() - 1), draws);
  Occupied occupied(question, width);
  const auto put = [&](int64_t at, int32_t key, std::span<const int32_t> value) {
    put_pair(probe.tokens, at, key, value);
    occupied.mark(at);
  };
  const std::vector<int32_t> value = draw_value(task, draws);
  put(probe.needle, keys[0], value);
  for (size_t i = 1; i < keys.size(); ++i)
    if (const int64_t at = occupied.find(last, draws); at > 0) put(at, keys[i], draw_value(task, draws));
  probe.tokens[question] = keys[0];
  std::copy(value.begin(), value.end() - 1, probe.tokens.begin() + question + 1);
  std::copy(value.begin(), value.end(), probe.targets.begin() + question);
  return probe;
}

class NeedleTokens final : public TokenSource {
 public:
  NeedleTokens(const NeedleTask& task, RandomUse use) : task_(task), use_(use) {}
  // The sequence has no end; this number is larger than any run needs.
  int64_t size() const override { return int64_t{1} << 61; }

  void read(int64_t begin, std::span<int32_t> out) const override {
    const int64_t T = task_.seq_len;
    std::vector<int32_t> tokens(static_cast<size_t>(T)), targets = tokens;
    while (!out.empty()) {
      write(begin / T, tokens, targets);
      const auto n = std::min<int64_t>(static_cast<int64_t>(out.size()), T - begin % T);
      std::copy_n(tokens.begin() + begin % T, n, out.begin());
      out = out.subspan(static_cast<size_t>(n));
      begin += n;
    }
  }

  void read_sequence(int64_t begin, std::span<int32_t> tokens, std::span<int32_t> targets) const override {
    const int64_t T = task_.seq_len;
    TRIAD_CHECK(begin % T == 0 && static_cast<int64_t>(tokens.size()) == T,
                "{}: a sequence of {} tokens from {} on was asked for", name(), tokens.size(), begin);
    write(begin / T, tokens, targets);
  }

  int64_t count_targets(int64_t) const override {
    return (task_.depth < 0 ? task_.pairs * task_.questions : 1) * task_.value_tokens;
  }

  std::string name() const override {
    return fmt::format("needles: {} keys with {} tokens each in sequences of {}", task_.pairs, task_.value_tokens,
                       task_.seq_len);
  }

 private:
  void write(int64_t sequence, std::span<int32_t> tokens, std::span<int32_t> targets) const {
    const Draws draws(task_.seed, random_stream(use_, static_cast<uint64_t>(sequence)));
    if (task_.depth < 0) return write_recall(task_, draws, tokens, targets);
    const NeedleProbe probe = make_probe(task_, task_.seq_len, task_.depth, draws);
    std::copy(probe.tokens.begin(), probe.tokens.end(), tokens.begin());
    std::copy(probe.targets.begin(), probe.targets.end(), targets.begin());
  }

  NeedleTask task_;
  RandomUse use_;
};

}  // namespace

void NeedleTask::check() const {
  if (kinds() < pairs)
    fail_usage("data.needle_pairs is {}: a vocabulary (model.vocab_size) of {} has {} keys, a third of it", pairs,
               vocab, kinds());
  if (depth >= 0) return check_length(*this, seq_len);
  // A pair that is placed makes at most 2 * width - 1 start positions impossible, so with this length every pair finds
  // a position.
  const int64_t width = 1 + value_tokens, needed = width + (pairs * (1 + questions) - 1) * (2 * width - 1) + 1;
  if (seq_len < needed)
    fail_usage(
        "train.seq_len is {}: {} pairs (data.needle_pairs) of a key and {} value tokens, and {} questions for each, "
        "need "
        "{} tokens to lie anywhere",
        seq_len, pairs, value_tokens, questions, needed);
}

DataSplit needle_data(const NeedleTask& task, double val_fraction) {
  task.check();
  DataSplit split{std::make_shared<NeedleTokens>(task, RandomUse::needle_train), no_tokens()};
  if (val_fraction > 0) split.val = std::make_shared<NeedleTokens>(task, RandomUse::needle_val);
  return split;
}

NeedleProbe needle_probe(const NeedleTask& task, int64_t length, double depth, uint64_t number) {
  // Each combination of length and depth has its own random streams.
  const Philox cell(static_cast<uint64_t>(length), static_cast<uint64_t>(std::llround(depth * 1e6)));
  return make_probe(task, length, depth,
                    Draws(task.seed, random_stream(RandomUse::needle_probe, (cell.bits(0) + number) % kManyStreams)));
}

}  // namespace triad
