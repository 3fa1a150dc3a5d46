// Kinds of needle task: answers are recomputed from the sequences by parsers that share no code with the generator, and
// a grid shows what a simulated model answers.
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "io/data/needle_grid.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

using Tokens = std::vector<int32_t>;

NeedleTask task_of(NeedleKind kind) {
  NeedleTask task{.kind = kind, .vocab = 100, .seq_len = 400, .pairs = 6, .questions = 2, .value_tokens = 3, .seed = 7};
  if (kind == NeedleKind::copy) task.questions = 1;
  return task;
}
const std::vector<NeedleKind> kNew = {NeedleKind::queries, NeedleKind::variables, NeedleKind::counting,
                                      NeedleKind::copy};

// The 100-token vocabulary: 33 keys, 33 value tokens, and hay, the last of which is the mark.
bool is_task_key(int32_t token) { return token >= 1 && token <= 33; }
bool is_value(int32_t token) { return token >= 34 && token <= 66; }
constexpr int32_t kMark = 99;

// A question in a task with three tokens per value, and where what it asks begins.
struct Question {
  Tokens prompt, answer;
  std::vector<int64_t> statements;  // their positions, ascending
};

struct Layout {
  int64_t prompt, answer, statements, width;
};
Layout layout_of(const NeedleTask& task) {
  switch (task.kind) {
    case NeedleKind::variables:
      return {2, 3, 1 + task.hops, 5};
    case NeedleKind::counting:
      return {2, 1, task.occurrences, 1};
    default:
      return {1, 3, 1, 4};
  }
}
int64_t end_of(const NeedleTask& task, int64_t length) {
  const Layout layout = layout_of(task);
  return length + 1 - task.questions * (layout.prompt + layout.answer);
}

// What a sequence says before position `end`.
struct Statements {
  // Each key's positions; in task variables, positions of statements that assign to it.
  std::map<int32_t, std::vector<int64_t>> keys;
  std::vector<int64_t> marks;
};
Statements read_statements(NeedleKind kind, const Tokens& tokens, int64_t end) {
  Statements found;
  for (int64_t i = 1; i < end; ++i) {
    const int32_t token = tokens[static_cast<size_t>(i)];
    if (kind == NeedleKind::variables) {
      if (tokens[static_cast<size_t>(i - 1)] == kMark) found.keys[token].push_back(i - 1);
    } else if (is_task_key(token)) {
      found.keys[token].push_back(i);
    }
    if (token == kMark) found.marks.push_back(i);
  }
  return found;
}

// Answers a question from the statements alone. It has no answer if they do not say one.
std::optional<Question> answer(const NeedleTask& task, const Tokens& tokens, const Statements& found,
                               const Tokens& prompt) {
  Question q{.prompt = prompt, .answer = {}, .statements = {}};
  const auto take = [&](int64_t from) { q.answer.assign(tokens.begin() + from, tokens.begin() + from + 3); };
  const auto places = [&](int32_t key) {
    const auto it = found.keys.find(key);
    return it == found.keys.end() ? std::vector<int64_t>{} : it->second;
  };
  switch (task.kind) {
    case NeedleKind::keys:
    case NeedleKind::queries:
      q.statements = places(prompt[0]);
      if (q.statements.size() != 1) return std::nullopt;
      take(q.statements[0] + 1);
      break;
    case NeedleKind::variables: {
      if (prompt[0] != kMark) return std::nullopt;
      for (int32_t name = prompt[1]; q.answer.empty();) {
        const std::vector<int64_t> at = places(name);
        if (at.size() != 1 || !is_task_key(name)) return std::nullopt;
        q.statements.insert(q.statements.begin(), at[0]);
        name = tokens[static_cast<size_t>(at[0] + 2)];
        if (!is_task_key(name)) take(at[0] + 2);
      }
      break;
    }
    case NeedleKind::counting:
      if (prompt[0] != kMark) return std::nullopt;
      q.statements = places(prompt[1]);
      q.answer = {static_cast<int32_t>(33 + q.statements.size())};
      break;
    case NeedleKind::copy:
      q.statements = found.marks;
      if (prompt[0] != kMark || found.marks.size() != 1) return std::nullopt;
      take(found.marks[0] + 1);
      break;
  }
  return q;
}

// The questions at a sequence's end with the answers that its statements give.
std::vector<Question> questions_of(const NeedleTask& task, const Tokens& tokens) {
  const int64_t end = end_of(task, static_cast<int64_t>(tokens.size()));
  const Statements found = read_statements(task.kind, tokens, end);
  const Layout layout = layout_of(task);
  std::vector<Question> questions;
  for (int64_t i = 0; i < task.questions; ++i) {
    const auto at = tokens.begin() + end + i * (layout.prompt + layout.answer);
    const auto q = answer(task, tokens, found, {at, at + layout.prompt});
    REQUIRE(q);
    questions.push_back(*q);
  }
  return questions;
}

// Checks everything that holds for a sequence with any depth; returns the position of the first question's needle.
// asked: how many statements lead to each answer; a training question may be about any name in its chain; null: a
// probe, which asks about the last.
int64_t check_sequence(const NeedleTask& task, const Tokens& tokens, const Tokens& targets, int64_t needles,
                       std::set<int64_t>* asked = nullptr) {
  const auto length = static_cast<int64_t>(tokens.size());
  const int64_t end = end_of(task, length);
  CHECK(tokens[0] == 0);
  CHECK(*std::min_element(tokens.begin() + 1, tokens.end()) >= 1);
  CHECK(*std::max_element(tokens.begin(), tokens.end()) < 100);
  const std::vector<Question> questions = questions_of(task, tokens);
  Tokens tail, expected(static_cast<size_t>(length), -1);
  std::set<Tokens> prompts;
  for (const Question& q : questions) {
    prompts.insert(q.prompt);
    tail.insert(tail.end(), q.prompt.begin(), q.prompt.end());
    std::copy(q.answer.begin(), q.answer.end(), expected.begin() + end + static_cast<int64_t>(tail.size()) - 1);
    tail.insert(tail.end(), q.answer.begin(), q.answer.end());
    const auto n = static_cast<int64_t>(q.statements.size());
    if (task.kind == NeedleKind::counting)
      CHECK((n >= 1 && n <= task.occurrences));
    else if (task.kind != NeedleKind::variables || asked == nullptr)
      CHECK(n == layout_of(task).statements);
    if (asked != nullptr) asked->insert(n);
    CHECK(std::is_sorted(q.statements.begin(), q.statements.end()));
    if (task.kind != NeedleKind::copy) CHECK(std::all_of(q.answer.begin(), q.answer.end(), is_value));
  }
  CHECK(prompts.size() == questions.size());
  CHECK(targets == expected);
  tail.pop_back();
  CHECK(std::equal(tail.begin(), tail.end(), tokens.begin() + end, tokens.end()));
  // The needles that are not asked have the same form.
  const Statements found = read_statements(task.kind, tokens, end);
  if (task.kind == NeedleKind::queries || task.kind == NeedleKind::counting)
    CHECK(static_cast<int64_t>(found.keys.size()) == needles);
  if (task.kind == NeedleKind::variables) {
    CHECK(static_cast<int64_t>(found.keys.size()) == needles * (1 + task.hops));
    CHECK(found.marks.size() == found.keys.size());
    int64_t longest = 0;  // full-length chains
    for (const auto& [name, at] : found.keys)
      longest +=
          static_cast<int64_t>(answer(task, tokens, found, {kMark, name}).value().statements.size()) == 1 + task.hops;
    CHECK(longest == needles);
  }
  if (task.kind == NeedleKind::counting) CHECK(found.marks.empty());
  return questions[0].statements[0];
}

struct TaskSequence {
  Tokens tokens, targets;
};
TaskSequence task_sequence(const TokenSource& source, int64_t number, int64_t T) {
  TaskSequence s{Tokens(static_cast<size_t>(T)), Tokens(static_cast<size_t>(T))};
  source.read_sequence(number * T, s.tokens, s.targets);
  return s;
}

}  // namespace

TEST_CASE("needle tasks: a probe's answers follow from its statements, and the needle is at its depth", "[needle]") {
  for (const NeedleKind kind : kNew)
    for (const int64_t hops : {1, 2, 5}) {
      NeedleTask task = task_of(kind);
      task.hops = hops;
      task.occurrences = 4 * hops;
      if (hops == 5) task.pairs = 5;  // 5 chains need 30 of the 33 keys
      const Layout layout = layout_of(task);
      std::set<Tokens> answers;
      int64_t farthest = 0;  // how far a chain's or counted key's statements lie from its first
      for (const int64_t length : {200, 400, 1000})
        for (const double depth : {0.0, 0.25, 0.5, 1.0})
          for (uint64_t number = 0; number < 6; ++number) {
            INFO(word_of(kind) << ", length " << length << ", depth " << depth << ", number " << number);
            const NeedleProbe p = needle_probe(task, length, depth, number);
            REQUIRE(static_cast<int64_t>(p.tokens.size()) == length);
            // As many others as in training, by length: at most as many as the 33 keys allow.
            const int64_t keys = kind == NeedleKind::variables ? 1 + hops : 1,
                          needles = std::min(2 + (task.pairs - 2) * length / 400, 33 / keys);
            const int64_t at = check_sequence(task, p.tokens, p.targets, needles);
            const int64_t last = end_of(task, length) - layout.statements * layout.width;
            CHECK(at == 1 + std::llround(depth * static_cast<double>(last - 1)));
            CHECK(at == p.needle);
            CHECK(p.tokens == needle_probe(task, length, depth, number).tokens);
            CHECK(p.tokens != needle_probe(task, length, depth, number + 6).tokens);
            NeedleTask other = task;
            other.seed = 8;
            CHECK(p.tokens != needle_probe(other, length, depth, number).tokens);
            const Question first = questions_of(task, p.tokens)[0];
            answers.insert(first.answer);
            farthest = std::max(farthest, first.statements.back() - at);
            // Around and inside a span are tokens of all kinds; around other needles there is only hay.
            const auto keys_and_values = std::count_if(p.tokens.begin(), p.tokens.end(),
                                                       [](int32_t token) { return token >= 1 && token <= 66; });
            if (kind == NeedleKind::copy) CHECK(keys_and_values > length / 2);
          }
      // All counts occur, and nearly all answers (three random tokens) differ.
      if (kind == NeedleKind::counting)
        CHECK(static_cast<int64_t>(answers.size()) >= std::min<int64_t>(task.occurrences, 18));
      else
        CHECK(answers.size() > 65);
      if (layout.statements > 1) CHECK(farthest > 600);
      if (kind == NeedleKind::copy) {
        std::set<int32_t> tokens;
        for (const Tokens& span : answers) tokens.insert(span.begin(), span.end());
        CHECK((is_task_key(*tokens.begin()) && *tokens.rbegin() > 66 && *tokens.rbegin() < kMark));
        CHECK(std::any_of(tokens.begin(), tokens.end(), is_value));
      }
    }
}

TEST_CASE("needle tasks: training sequences hold all needles at any depth, to the smallest length", "[needle]") {
  for (const NeedleKind kind : kNew) {
    INFO(word_of(kind));
    NeedleTask task = task_of(kind);
    const Layout layout = layout_of(task);
    const DataSplit data = needle_data(task, 0.1);
    CHECK(data.train->count_targets(400) == task.questions * layout.answer);
    std::vector<int64_t> places;
    std::set<int64_t> asked;
    for (int64_t number = 0; number < 200; ++number) {
      const TaskSequence s = task_sequence(*data.train, number, 400);
      places.push_back(check_sequence(task, s.tokens, s.targets, task.pairs, &asked));
    }
    if (kind == NeedleKind::variables) CHECK(asked == std::set<int64_t>{1, 2, 3});
    // Half the positions are uniform, the others at a log-uniform distance from the last.
    const int64_t last = end_of(task, 400) - layout.statements * layout.width;
    const auto count = [&](int64_t from, int64_t to) {
      return std::count_if(places.begin(), places.end(), [&](int64_t at) { return at >= from && at <= to; });
    };
    CHECK(count(1, last) == 200);
    CHECK(count(1, last / 4) >= 20);
    CHECK(count(last / 4, last / 2) >= 20);
    CHECK(count(last - 9, last) >= 15);
    const TaskSequence s = task_sequence(*data.train, 3, 400);
    CHECK(s.tokens != task_sequence(*data.val, 3, 400).tokens);
    CHECK(s.tokens == task_sequence(*needle_data(task, 0).train, 3, 400).tokens);
    NeedleTask fixed = task;
    fixed.depth = 0.5;
    const TaskSequence middle = task_sequence(*needle_data(fixed, 0).train, 9, 400);
    CHECK(check_sequence(fixed, middle.tokens, middle.targets, task.pairs) ==
          1 + std::llround(0.5 * static_cast<double>(last - 1)));

    const int64_t needles = kind == NeedleKind::copy ? 1 : task.pairs;
    // The shortest sequence in which a statement can be placed however the others are placed.
    task.seq_len = layout.width + (needles * layout.statements - 1) * (2 * layout.width - 1) +
                   task.questions * (layout.prompt + layout.answer);
    const DataSplit dense = needle_data(task, 0);
    for (int64_t number = 0; number < 100; ++number) {
      const TaskSequence row = task_sequence(*dense.train, number, task.seq_len);
      check_sequence(task, row.tokens, row.targets, task.pairs, &asked);
    }
    --task.seq_len;
    check_error([&] { needle_data(task, 0); }, {std::to_string(task.seq_len), std::to_string(task.seq_len + 1)});
  }
}

TEST_CASE("needle tasks: the grid shows what a simulated model answers, of all questions", "[needle]") {
  for (const NeedleKind kind : kNew) {
    INFO(word_of(kind));
    const NeedleTask task = task_of(kind);
    // Answers all questions if the first one's needle is among the last `reach` tokens, but gives a wrong token as
    // answer number `wrong`.
    const auto model = [&](int64_t reach, int64_t wrong) {
      return [&task, reach, wrong](std::span<const int32_t> tokens, std::span<const int32_t>, int64_t T) {
        std::vector<int32_t> out;
        for (size_t s = 0; s < tokens.size(); s += static_cast<size_t>(T)) {
          const std::vector<Question> questions = questions_of(
              task, {tokens.begin() + static_cast<int64_t>(s), tokens.begin() + static_cast<int64_t>(s) + T});
          const bool known = questions[0].statements[0] >= T - reach;
          int64_t number = 0;
          for (const Question& q : questions)
            for (const int32_t token : q.answer) out.push_back(known && number++ != wrong ? token : 0);
        }
        return out;
      };
    };
    const NeedleQuestions asked{.lengths = {400, 200}, .depths = {1, 0.5, 0}, .samples = 5, .batch = 3};
    const NeedleGrid all = measure_needles(task, asked, model(400, -1));
    CHECK(all.right == std::vector<int64_t>(6, 5));
    CHECK(all.overall() == 1);
    const int64_t last = task.questions * layout_of(task).answer - 1;
    for (const int64_t wrong : {int64_t{0}, last})
      CHECK(measure_needles(task, asked, model(400, wrong)).right == std::vector<int64_t>(6, 0));
    const NeedleGrid near = measure_needles(task, asked, model(130, -1));
    CHECK(near.right == std::vector<int64_t>{0, 0, 5, 0, 5, 5});
    CHECK(near.overall() == 0.5);
  }
  CHECK(needle_file(NeedleKind::keys, "csv") == "needle.csv");
  CHECK(needle_file(NeedleKind::copy, "svg") == "needle_copy.svg");
}

TEST_CASE("needle tasks: sizes that do not fit are refused, with the value", "[needle]") {
  const auto refused = [](NeedleKind kind, auto&& change, const std::vector<std::string>& words) {
    NeedleTask task = task_of(kind);
    change(task);
    check_error([&] { needle_data(task, 0); }, words);
  };
  refused(NeedleKind::queries, [](NeedleTask& t) { t.questions = 7; }, {"needle_questions is 7", "6 at most"});
  refused(NeedleKind::copy, [](NeedleTask& t) { t.questions = 2; }, {"needle_questions is 2", "1 at most"});
  refused(NeedleKind::variables, [](NeedleTask& t) { t.hops = 5; }, {"needle_pairs is 6", "33 keys", "needs 6 each"});
  refused(NeedleKind::counting, [](NeedleTask& t) { t.occurrences = 34; }, {"needle_occurrences is 34", "33 tokens"});
  refused(NeedleKind::copy, [](NeedleTask& t) { t.vocab = 4; }, {"vocabulary (model.vocab_size) of 4", "mark"});
  check_error([] { needle_probe(task_of(NeedleKind::variables), 59, 0.5, 0); }, {"length of 59", "60 tokens"});
  NeedleTask few = task_of(NeedleKind::variables);
  few.hops = 16;
  check_error([&] { needle_probe(few, 4000, 0.5, 0); }, {"2 questions", "34 keys", "has 33"});
}

TEST_CASE("needle tasks: the sequences of keys are those of earlier versions", "[needle]") {
  uint64_t hash = 0;
  const auto restart = [&] { hash = 14695981039346656037ull; };
  const auto add = [&](const Tokens& tokens) {
    for (const int32_t token : tokens) hash = (hash ^ static_cast<uint32_t>(token)) * 1099511628211ull;
  };
  const auto add_rows = [&](const NeedleTask& task) {
    const DataSplit data = needle_data(task, 0.1);
    for (const auto& source : {data.train, data.val})
      for (int64_t number = 0; number < 20; ++number) {
        const TaskSequence s = task_sequence(*source, number, task.seq_len);
        add(s.tokens);
        add(s.targets);
      }
  };
  NeedleTask task{.vocab = 100, .seq_len = 256, .pairs = 12, .questions = 2, .value_tokens = 2, .seed = 7};
  restart();
  add_rows(task);
  CHECK(hash == 0x35384c3bb9190205);
  NeedleTask fixed = task;
  fixed.depth = 0.25;
  restart();
  add_rows(fixed);
  CHECK(hash == 0xd956da14fb1508ce);
  restart();
  for (const int64_t length : {6, 40, 256, 1000})
    for (const double depth : {0.0, 0.3, 1.0})
      for (uint64_t number = 0; number < 10; ++number) {
        const NeedleProbe p = needle_probe(task, length, depth, number);
        add(p.tokens);
        add(p.targets);
        hash ^= static_cast<uint64_t>(p.needle);
      }
  NeedleTask dense = task;  // some pairs find no room
  dense.pairs = 33;
  dense.seq_len = 90;
  for (uint64_t number = 0; number < 20; ++number) {
    const NeedleProbe p = needle_probe(dense, 90, 0.5, number);
    add(p.tokens);
    add(p.targets);
  }
  CHECK(hash == 0xc8588b61d3531b66);
}
