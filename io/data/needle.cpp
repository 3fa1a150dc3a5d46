#include "io/data/needle.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/random_streams.h"
#include "engine/rng.h"

namespace triad {

namespace {

// A random number sequence.
class NeedleDraws {
 public:
  NeedleDraws(uint64_t seed, uint64_t stream) : random_(seed, stream) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_.below(next_++, static_cast<uint64_t>(n))); }

 private:
  Philox random_;
  uint64_t next_ = 0;
};

bool has_mark(const NeedleTask& task) { return task.kind != NeedleKind::keys && task.kind != NeedleKind::queries; }

// A random token around the needles. For copy it is any token, so that only its mark tells a span.
int32_t draw_hay(const NeedleTask& task, NeedleDraws& draws) {
  const int64_t first = task.kind == NeedleKind::copy ? 1 : task.first_hay(), end = task.vocab - has_mark(task);
  return static_cast<int32_t>(first + draws.below(end - first));
}

// Returns n distinct random keys.
std::vector<int32_t> draw_keys(const NeedleTask& task, int64_t n, NeedleDraws& draws) {
  std::vector<int32_t> keys(static_cast<size_t>(task.kinds()));
  std::iota(keys.begin(), keys.end(), 1);
  for (int64_t i = 0; i < n; ++i) std::swap(keys[i], keys[i + draws.below(task.kinds() - i)]);
  keys.resize(static_cast<size_t>(n));
  return keys;
}

std::vector<int32_t> draw_value(const NeedleTask& task, NeedleDraws& draws) {
  std::vector<int32_t> value(static_cast<size_t>(task.value_tokens));
  for (int32_t& token : value) token = static_cast<int32_t>(task.first_value() + draws.below(task.kinds()));
  return value;
}

void put_pair(std::span<int32_t> tokens, int64_t at, int32_t key, std::span<const int32_t> value) {
  tokens[at] = key;
  std::copy(value.begin(), value.end(), tokens.begin() + at + 1);
}

// Records which positions in a sequence pairs occupy.
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
  int64_t find(int64_t last, NeedleDraws& draws) const {
    const int64_t from = draws.below(last);
    for (int64_t step = 0; step < last; ++step)
      if (const int64_t at = 1 + (from + step) % last; free(at)) return at;
    return 0;
  }

 private:
  std::vector<bool> occupied_;
  int64_t width_;
};

// A random position at which a pair fits: uniform, or at a log-uniform distance from `other`, which is the key's
// position drawn before, or 0, the sequence's beginning, for the first.
int64_t draw_place(const Occupied& occupied, int64_t other, int64_t last, NeedleDraws& draws) {
  // Random draws before a search; few are needed while at most half the positions are occupied.
  constexpr int kTries = 64;
  for (int i = 0; i < kTries; ++i) {
    const int64_t octave = int64_t{1} << draws.below(std::bit_width(static_cast<uint64_t>(last)));
    const int64_t distance = octave + draws.below(octave), side = draws.below(2) == 0 ? 1 : -1;
    const int64_t at = draws.below(2) == 0 ? 1 + draws.below(last) : other + side * distance;
    if (at >= 1 && at <= last && occupied.free(at)) return at;
  }
  return occupied.find(last, draws);
}

// Writes a training or validation sequence with all its pairs and questions.
void write_recall(const NeedleTask& task, NeedleDraws draws, std::span<int32_t> tokens, std::span<int32_t> targets) {
  const int64_t width = 1 + task.value_tokens, last = task.seq_len - width;
  for (int32_t& token : tokens) token = draw_hay(task, draws);
  tokens[0] = 0;
  std::fill(targets.begin(), targets.end(), -1);
  Occupied occupied(task.seq_len, width);
  const std::vector<int32_t> keys = draw_keys(task, task.pairs, draws);
  for (int64_t k = 0; k < task.pairs; ++k) {
    // Every second key has one question, and its neighbour has twice the mean number less one. So some answers are far
    // from any other occurrence of the key.
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

// Whether questions are at any position, not at the end.
bool many_questions(const NeedleTask& task) { return task.kind == NeedleKind::keys && task.depth < 0; }

// The sizes of a task's needles and questions, in tokens unless they count something.
struct NeedleSizes {
  int64_t needles;     // needles per training sequence
  int64_t questions;   // questions at the end
  int64_t keys;        // different keys that a needle needs
  int64_t statements;  // the most statements per needle
  int64_t width;       // longest statement's tokens
  int64_t prompt, answer;

  // The most needles a sequence can have: no two have a key in common.
  int64_t most(const NeedleTask& task) const { return keys > 0 ? task.kinds() / keys : 1; }
  // Where the questions begin in a sequence of `length` tokens. The sequence lacks the last answer's last token, which
  // is only a target.
  int64_t end(int64_t length) const { return length + 1 - questions * (prompt + answer); }
  // The fewest tokens that hold n needles and the questions. Once a statement is placed, another cannot begin at up to
  // 2 * width - 1 positions, so with this length the last statement too finds one.
  int64_t tokens_for(int64_t n) const {
    return 1 + (n * statements - 1) * (2 * width - 1) + width + questions * (prompt + answer) - 1;
  }
};
NeedleSizes sizes_of(const NeedleTask& task) {
  NeedleSizes sizes{.needles = task.pairs,
                    .questions = task.questions,
                    .keys = 1,
                    .statements = 1,
                    .width = 1 + task.value_tokens,
                    .prompt = 1,
                    .answer = task.value_tokens};
  switch (task.kind) {
    case NeedleKind::keys:
      sizes.questions = 1;
      break;
    case NeedleKind::queries:
      break;
    case NeedleKind::variables:
      sizes.keys = sizes.statements = 1 + task.hops;
      sizes.width = 2 + task.value_tokens;
      sizes.prompt = 2;
      break;
    case NeedleKind::counting:
      sizes.statements = task.occurrences;
      sizes.width = 1;
      sizes.prompt = 2;
      sizes.answer = 1;
      break;
    case NeedleKind::copy:
      sizes.needles = 1;
      sizes.keys = 0;
      break;
  }
  return sizes;
}

// Throws a UsageError unless a sequence of `length` tokens can hold the needles asked for.
void check_questions(const NeedleTask& task, int64_t length) {
  const NeedleSizes sizes = sizes_of(task);
  const std::string_view word = word_of(task.kind);
  if (sizes.questions > sizes.needles)
    fail_usage("data.needle_questions is {}: task {} asks about {} at most{}", sizes.questions, word, sizes.needles,
               task.kind == NeedleKind::copy ? "" : " (data.needle_pairs)");
  if (task.kind == NeedleKind::counting && task.occurrences > task.kinds())
    fail_usage(
        "data.needle_occurrences is {}: a vocabulary (model.vocab_size) of {} has {} tokens for counts, a third "
        "of it",
        task.occurrences, task.vocab, task.kinds());
  if (has_mark(task) && task.mark() <= task.first_hay())
    fail_usage("a vocabulary (model.vocab_size) of {} has no token for the mark of task {}: at least 5 are needed",
               task.vocab, word);
  if (task.kinds() < sizes.questions * sizes.keys)
    fail_usage("{} of task {} need {}: a vocabulary (model.vocab_size) of {} has {}, a third of it",
               counted(sizes.questions, "question"), word, counted(sizes.questions * sizes.keys, "key"), task.vocab,
               task.kinds());
  const int64_t needed = shortest_probe(task);
  if (length < needed) {
    if (task.kind == NeedleKind::keys)
      fail_usage("a needle of {} and its question need {} tokens: a length of {} has no room for them",
                 counted(task.value_tokens, "value token"), needed, length);
    fail_usage("task {}: {} about {} of up to {} each need {} tokens: a length of {} has no room for them", word,
               counted(sizes.questions, "question"), counted(sizes.questions * sizes.statements, "statement"),
               counted(sizes.width, "token"), needed, length);
  }
}

// A needle: its statements in order, and the question about it.
struct Needle {
  std::vector<std::vector<int32_t>> statements;
  std::vector<int32_t> prompt, answer;
};
// keys: the needle's keys, NeedleSizes::keys of them. any_name: in the task variables, the question is about a random
// name in the chain; otherwise about the last one.
Needle draw_needle(const NeedleTask& task, std::span<const int32_t> keys, bool any_name, NeedleDraws& draws) {
  Needle needle;
  const auto state = [&needle](std::vector<int32_t> statement, std::span<const int32_t> rest = {}) {
    statement.insert(statement.end(), rest.begin(), rest.end());
    needle.statements.push_back(std::move(statement));
  };
  switch (task.kind) {
    case NeedleKind::keys:
    case NeedleKind::queries:
      needle.answer = draw_value(task, draws);
      needle.prompt = {keys[0]};
      state({keys[0]}, needle.answer);
      break;
    case NeedleKind::variables:
      needle.answer = draw_value(task, draws);
      needle.prompt = {task.mark(), any_name ? keys[draws.below(task.hops + 1)] : keys.back()};
      state({task.mark(), keys[0]}, needle.answer);
      for (size_t i = 1; i < keys.size(); ++i) state({task.mark(), keys[i], keys[i - 1]});
      break;
    case NeedleKind::counting: {
      const int64_t count = 1 + draws.below(task.occurrences);
      needle.answer = {task.count_token(count)};
      needle.prompt = {task.mark(), keys[0]};
      for (int64_t i = 0; i < count; ++i) state({keys[0]});
      break;
    }
    case NeedleKind::copy:
      for (int64_t i = 0; i < task.value_tokens; ++i) needle.answer.push_back(draw_hay(task, draws));
      needle.prompt = {task.mark()};
      state({task.mark()}, needle.answer);
      break;
  }
  return needle;
}

// Positions for n statements of `width` tokens before `end`: the first is at `first`, the others follow at random.
std::vector<int64_t> spread(int64_t n, int64_t first, int64_t width, int64_t end, NeedleDraws& draws) {
  std::vector<int64_t> places = {0};
  const int64_t room = end - first - n * width;
  for (int64_t i = 1; i < n; ++i) places.push_back(draws.below(room + 1));
  std::sort(places.begin(), places.end());
  for (int64_t i = 0; i < n; ++i) places[i] += first + i * width;
  return places;
}

// Throws a UsageError unless a probe of `length` tokens can have so many needles (triad eval --needle --pairs).
void check_needles(const NeedleTask& task, int64_t needles, int64_t length) {
  const NeedleSizes sizes = sizes_of(task);
  const std::string_view word = word_of(task.kind);
  if (needles < sizes.questions) fail_usage("--pairs is {}: task {} asks about {}", needles, word, sizes.questions);
  if (needles > sizes.most(task))
    fail_usage(
        "--pairs is {}: task {} has {} at most{}", needles, word, sizes.most(task),
        sizes.keys > 0
            ? fmt::format(", since a vocabulary (model.vocab_size) of {} has {} keys, a third of it{}", task.vocab,
                          task.kinds(), sizes.keys > 1 ? fmt::format(", and each needs {}", sizes.keys) : "")
            : "");
  if (const int64_t needed = sizes.tokens_for(needles); length < needed)
    fail_usage("--pairs is {}: task {} needs {} tokens for them, and a length of {} has no room", needles, word, needed,
               length);
}

// Makes a sequence with the questions at its end. depth: as in NeedleTask; if it is -1, the first question's needle is
// at a random position, and in the task variables a question may be about any name in a chain. needles: as in
// needle_probe.
NeedleProbe make_probe(const NeedleTask& task, int64_t length, double depth, NeedleDraws draws, int64_t needles = 0) {
  check_questions(task, length);
  if (needles > 0) check_needles(task, needles, length);
  const NeedleSizes sizes = sizes_of(task);
  const int64_t end = sizes.end(length), last = end - sizes.width;  // a statement may begin in 1 .. last
  NeedleProbe probe{.tokens = std::vector<int32_t>(static_cast<size_t>(length)),
                    .targets = std::vector<int32_t>(static_cast<size_t>(length), -1)};
  for (int32_t& token : probe.tokens) token = draw_hay(task, draws);
  probe.tokens[0] = 0;
  Occupied occupied(end, sizes.width);
  const int64_t last_first = end - sizes.statements * sizes.width;
  probe.needle = depth < 0 ? draw_place(occupied, last_first + 1, last_first, draws)
                           : 1 + std::llround(depth * static_cast<double>(last_first - 1));
  const auto others = static_cast<int64_t>(static_cast<double>(sizes.needles - sizes.questions) *
                                           static_cast<double>(length) / static_cast<double>(task.seq_len));
  if (needles == 0) needles = std::min(sizes.questions + others, sizes.most(task));
  const std::vector<int32_t> keys = draw_keys(task, needles * sizes.keys, draws);
  std::vector<int32_t> questions;
  for (int64_t i = 0; i < needles; ++i) {
    std::vector<int64_t> places;
    for (int64_t s = 0; i > 0 && s < sizes.statements; ++s)
      if (const int64_t at = occupied.find(last, draws); at > 0) {
        places.push_back(at);
        occupied.mark(at);
      }
    if (i > 0 && static_cast<int64_t>(places.size()) < sizes.statements) {
      TRIAD_CHECK(i >= sizes.questions, "needle {}, which is asked, has no room in {} tokens", i, length);
      continue;
    }
    const Needle needle = draw_needle(task, std::span(keys).subspan(i * sizes.keys, sizes.keys), depth < 0, draws);
    const auto n = static_cast<int64_t>(needle.statements.size());
    if (i == 0) places = spread(n, probe.needle, sizes.width, end, draws);
    places.resize(n);
    std::sort(places.begin(), places.end());
    for (int64_t s = 0; s < n; ++s) {
      std::copy(needle.statements[s].begin(), needle.statements[s].end(), probe.tokens.begin() + places[s]);
      if (i == 0) occupied.mark(places[s]);
    }
    if (i >= sizes.questions) continue;
    questions.insert(questions.end(), needle.prompt.begin(), needle.prompt.end());
    questions.insert(questions.end(), needle.answer.begin(), needle.answer.end());
    std::copy(needle.answer.begin(), needle.answer.end(),
              probe.targets.begin() + end + static_cast<int64_t>(questions.size()) - sizes.answer - 1);
  }
  std::copy(questions.begin(), questions.end() - 1, probe.tokens.begin() + end);
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
    if (many_questions(task_)) return task_.pairs * task_.questions * task_.value_tokens;
    const NeedleSizes sizes = sizes_of(task_);
    return sizes.questions * sizes.answer;
  }

  std::string name() const override {
    if (task_.kind == NeedleKind::keys)
      return fmt::format("needles: {} with {} each in sequences of {}", counted(task_.pairs, "key"),
                         counted(task_.value_tokens, "token"), task_.seq_len);
    const NeedleSizes sizes = sizes_of(task_);
    return fmt::format("needles, task {}: {} in sequences of {}, {} with answers of {}", word_of(task_.kind),
                       sizes.needles, task_.seq_len, counted(sizes.questions, "question"),
                       counted(sizes.answer, "token"));
  }

 private:
  void write(int64_t sequence, std::span<int32_t> tokens, std::span<int32_t> targets) const {
    const NeedleDraws draws(task_.seed, random_stream(use_, static_cast<uint64_t>(sequence)));
    if (many_questions(task_)) return write_recall(task_, draws, tokens, targets);
    const NeedleProbe probe = make_probe(task_, task_.seq_len, task_.depth, draws);
    std::copy(probe.tokens.begin(), probe.tokens.end(), tokens.begin());
    std::copy(probe.targets.begin(), probe.targets.end(), targets.begin());
  }

  NeedleTask task_;
  RandomUse use_;
};

}  // namespace

void NeedleTask::check() const {
  const NeedleSizes sizes = sizes_of(*this);
  if (kinds() < pairs * sizes.keys)
    fail_usage("data.needle_pairs is {}: a vocabulary (model.vocab_size) of {} has {} keys, a third of it{}", pairs,
               vocab, kinds(), sizes.keys > 1 ? fmt::format("; task {} needs {} each", word_of(kind), sizes.keys) : "");
  if (kind != NeedleKind::keys || depth >= 0) check_questions(*this, seq_len);
  if (kind == NeedleKind::keys && depth < 0) {
    // As NeedleSizes::tokens_for, with each question a statement.
    const int64_t width = 1 + value_tokens, needed = width + (pairs * (1 + questions) - 1) * (2 * width - 1) + 1;
    if (seq_len < needed)
      fail_usage(
          "train.seq_len is {}: {} (data.needle_pairs) of a key and {}, and {} for each, need {} tokens to lie "
          "anywhere",
          seq_len, counted(pairs, "pair"), counted(value_tokens, "value token"), counted(questions, "question"),
          needed);
  } else if (const int64_t needed = sizes.tokens_for(sizes.needles); seq_len < needed) {
    fail_usage(
        "train.seq_len is {}: task {} with {} (data.needle_pairs) of {} of up to {}, and {} (data.needle_questions), "
        "needs {} tokens for them to be anywhere",
        seq_len, word_of(kind), counted(sizes.needles, "needle"), counted(sizes.statements, "statement"),
        counted(sizes.width, "token"), counted(sizes.questions, "question"), needed);
  }
}

DataSplit needle_data(const NeedleTask& task, double val_fraction) {
  task.check();
  DataSplit split{std::make_shared<NeedleTokens>(task, RandomUse::needle_train), no_tokens()};
  if (val_fraction > 0) split.val = std::make_shared<NeedleTokens>(task, RandomUse::needle_val);
  return split;
}

int64_t shortest_probe(const NeedleTask& task, int64_t needles) {
  const NeedleSizes sizes = sizes_of(task);
  return sizes.tokens_for(std::max(sizes.questions, std::min(needles, sizes.most(task))));
}

NeedleProbe needle_probe(const NeedleTask& task, int64_t length, double depth, uint64_t number, int64_t needles) {
  if (!(depth >= 0 && depth <= 1)) fail_usage("a needle's depth is {}: a number in [0, 1] is needed", depth);
  // Each length and depth has its own random streams.
  const Philox cell(static_cast<uint64_t>(length), static_cast<uint64_t>(std::llround(depth * 1e6)));
  return make_probe(
      task, length, depth,
      NeedleDraws(task.seed, random_stream(RandomUse::needle_probe, (cell.bits(0) + number) % kManyStreams)), needles);
}

}  // namespace triad
