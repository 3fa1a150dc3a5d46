// The needle task, in which a model recalls values by their keys: sequences have the documented contents, in any
// reading order; a grid over lengths and depths measures a model's recall; a small model learns the task.
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <map>
#include <set>

#include "io/data/loader.h"
#include "io/data/needle_grid.h"
#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

constexpr NeedleTask kTask = {.vocab = 100, .seq_len = 256, .pairs = 12, .questions = 2, .value_tokens = 2, .seed = 7};

struct Sequence {
  std::vector<int32_t> tokens, targets;
};
Sequence sequence_of(const TokenSource& source, int64_t number, int64_t T) {
  Sequence s{std::vector<int32_t>(static_cast<size_t>(T)), std::vector<int32_t>(static_cast<size_t>(T))};
  source.read_sequence(number * T, s.tokens, s.targets);
  return s;
}

bool is_key(const NeedleTask& task, int32_t token) { return token >= 1 && token < task.first_value(); }

// Returns each key's positions.
std::map<int32_t, std::vector<int64_t>> places_of_keys(const NeedleTask& task, const std::vector<int32_t>& tokens) {
  std::map<int32_t, std::vector<int64_t>> places;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (is_key(task, tokens[i])) places[tokens[i]].push_back(static_cast<int64_t>(i));
  return places;
}

std::vector<int32_t> values_at(const NeedleTask& task, const std::vector<int32_t>& tokens, int64_t key) {
  return {tokens.begin() + key + 1, tokens.begin() + key + 1 + task.value_tokens};
}

const std::string kConfig = TRIAD_SOURCE_DIR "/configs/needle_1k.json";
// Arguments for a needle task that a model learns within a test.
const std::string kSmall =
    kConfig +
    " --set runtime.device=cpu --set runtime.precision=fp32 --set model.n_layers=2 --set 'model.dense_layers=\"\"' "
    "--set train.optimizer=adamw --set train.min_lr_fraction=1 --set model.dim=32 --set model.n_heads=2 --set "
    "model.n_kv_groups=1 --set model.d_k=16 --set model.d_v=16 --set model.vocab_size=25 --set nsa.l=4 --set nsa.d=2 "
    "--set nsa.l_sel=8 --set nsa.n_sel=4 --set nsa.w=8 --set nsa.phi=avg --set train.seq_len=64 --set "
    "data.needle_pairs=6 --set "
    "data.needle_questions=2 --set model.init_std=0.1 --set "
    "train.steps=20 --set train.warmup_steps=10 --set log.every=1 ";

Outcome succeed(const std::string& args) {
  const Outcome outcome = run_program(args);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return outcome;
}

}  // namespace

TEST_CASE("needle: keys at the very beginning are frequent in training, at any length", "[needle]") {
  // A key's first occurrence is at a log-uniform distance from the beginning in a third of the cases: position 1 has
  // some 12 / 3 / 15 of the sequences, where uniform positions would give it 36 / 32,768 of them. An eighth of the
  // other keys, whose three positions are uniform, begins in the second half.
  NeedleTask task = kTask;
  task.seq_len = 32'768;
  const DataSplit data = needle_data(task, 0);
  int64_t first = 0, late = 0;
  for (int64_t number = 0; number < 100; ++number) {
    const std::vector<int32_t> tokens = sequence_of(*data.train, number, task.seq_len).tokens;
    first += is_key(task, tokens[1]);
    for (const auto& [key, at] : places_of_keys(task, tokens)) late += at.front() > task.seq_len / 2;
  }
  CHECK(first > 10);
  CHECK(first < 50);
  CHECK(late > 50);
}

TEST_CASE("needle: every key is followed by its value, and only answers are targets", "[needle]") {
  const DataSplit data = needle_data(kTask, 0.1);
  REQUIRE(data.train->count_targets(kTask.seq_len) == 48);
  std::set<int64_t> distances;
  for (int64_t number = 0; number < 100; ++number) {
    const Sequence s = sequence_of(*data.train, number, kTask.seq_len);
    CHECK(s.tokens[0] == 0);
    CHECK(*std::min_element(s.tokens.begin() + 1, s.tokens.end()) >= 1);
    CHECK(*std::max_element(s.tokens.begin(), s.tokens.end()) < kTask.vocab);
    const auto places = places_of_keys(kTask, s.tokens);
    REQUIRE(places.size() == 12);
    std::vector<int32_t> expected(static_cast<size_t>(kTask.seq_len), -1);
    std::map<size_t, int> sizes;
    for (const auto& [key, at] : places) {
      REQUIRE(at.size() >= 2);
      ++sizes[at.size()];
      const std::vector<int32_t> value = values_at(kTask, s.tokens, at[0]);
      for (const int32_t token : value) CHECK((token >= kTask.first_value() && token < kTask.first_hay()));
      for (size_t i = 1; i < at.size(); ++i) {
        CHECK(value == values_at(kTask, s.tokens, at[i]));
        std::copy(value.begin(), value.end(), expected.begin() + at[i]);
        distances.insert(at[i] - at[i - 1]);
      }
    }
    // Each key occurs once with its value; then 6 keys occur in one question and 6 in three.
    CHECK(sizes == std::map<size_t, int>{{2, 6}, {4, 6}});
    CHECK(s.targets == expected);
    // All other tokens are filler ("hay").
    CHECK(std::count_if(s.tokens.begin(), s.tokens.end(), [](int32_t t) { return t >= kTask.first_hay(); }) ==
          255 - 12 * 3 * 3);
  }
  // The smallest distance is 3 tokens, a key and its two value tokens; the largest is nearly the whole sequence.
  CHECK(*distances.begin() == 3);
  CHECK(*distances.rbegin() >= 200);
}

TEST_CASE("needle: a sequence of the smallest allowed length contains the whole task", "[needle]") {
  for (const NeedleTask& task :
       {NeedleTask{.vocab = 31, .seq_len = 60, .pairs = 10, .questions = 1},
        NeedleTask{.vocab = 31, .seq_len = 29, .pairs = 2, .questions = 2, .value_tokens = 2}}) {
    const DataSplit data = needle_data(task, 0);
    for (int64_t number = 0; number < 300; ++number) {
      const auto places = places_of_keys(task, sequence_of(*data.train, number, task.seq_len).tokens);
      CHECK(static_cast<int64_t>(places.size()) == task.pairs);
      int64_t questions = 0;
      for (const auto& [key, at] : places) questions += static_cast<int64_t>(at.size()) - 1;
      CHECK(questions == task.pairs * task.questions);
    }
    NeedleTask shorter = task;
    --shorter.seq_len;
    CHECK_THROWS_AS(needle_data(shorter, 0), UsageError);
  }
}

TEST_CASE("needle: a sequence depends on its seed and number only, not on how it is read", "[needle]") {
  const int64_t T = kTask.seq_len;
  const DataSplit data = needle_data(kTask, 0.1), again = needle_data(kTask, 0.5);
  NeedleTask other = kTask;
  other.seed = 8;
  const Sequence s = sequence_of(*data.train, 5, T);
  CHECK(s.tokens == sequence_of(*again.train, 5, T).tokens);
  CHECK(s.tokens != sequence_of(*data.train, 6, T).tokens);
  CHECK(s.tokens != sequence_of(*data.val, 5, T).tokens);
  CHECK(s.tokens != sequence_of(*needle_data(other, 0).train, 5, T).tokens);
  CHECK(needle_data(kTask, 0).val->size() == 0);
  std::vector<int32_t> across(static_cast<size_t>(2 * T));  // mid-sequence 4 to mid-sequence 6
  data.train->read(4 * T + T / 2, across);
  CHECK(std::equal(s.tokens.begin(), s.tokens.end(), across.begin() + T / 2));

  // The loader gives targets too, different ranks read different sequences, and a resume continues at the right
  // sequence.
  const LoaderOptions options{.seq_len = T, .micro_batch = 2, .micro_steps = 1, .seed = 3};
  Loader whole(data.train, options);
  LoaderOptions first = options, second = options, later = options;
  first.world = second.world = 2;
  first.micro_batch = second.micro_batch = 1;
  second.rank = 1;
  later.first_sequence = 2;
  Loader a(data.train, first), b(data.train, second), resumed(data.train, later);
  for (int step = 0; step < 3; ++step) {
    const Batch batch = whole.next();
    std::vector<int32_t> tokens = a.next().tokens;
    const std::vector<int32_t> more = b.next().tokens;
    tokens.insert(tokens.end(), more.begin(), more.end());
    CHECK(batch.tokens == tokens);
    CHECK(std::count_if(batch.targets.begin(), batch.targets.end(), [](int32_t t) { return t >= 0; }) == 2 * 48);
    if (step > 0) {
      const Batch rest = resumed.next();
      CHECK(rest.tokens == batch.tokens);
      CHECK(rest.targets == batch.targets);
    }
  }
}

TEST_CASE("needle: a probe's needle is at the requested depth, to the token", "[needle]") {
  for (const int64_t length : {6, 40, 256, 1000})
    for (const double depth : {0.0, 0.25, 0.5, 1.0}) {
      const NeedleProbe p = needle_probe(kTask, length, depth, 3);
      INFO("length " << length << ", depth " << depth);
      const int64_t question = length - 2, last = question - 3;
      REQUIRE(static_cast<int64_t>(p.tokens.size()) == length);
      CHECK(p.needle == 1 + std::llround(depth * static_cast<double>(last - 1)));
      CHECK(p.tokens[static_cast<size_t>(p.needle)] == p.tokens[static_cast<size_t>(question)]);
      const auto places = places_of_keys(kTask, p.tokens);
      CHECK(static_cast<int64_t>(places.size()) == 1 + std::min<int64_t>(32, 11 * length / 256));
      for (const auto& [key, at] : places) CHECK(at.size() == (key == p.tokens[static_cast<size_t>(question)] ? 2 : 1));
      const std::vector<int32_t> value = values_at(kTask, p.tokens, p.needle);
      std::vector<int32_t> expected(static_cast<size_t>(length), -1);
      std::copy(value.begin(), value.end(), expected.begin() + question);
      CHECK(p.targets == expected);
      CHECK(p.tokens.back() == value[0]);
      CHECK(p.tokens != needle_probe(kTask, length, depth, 4).tokens);
      CHECK(p.tokens == needle_probe(kTask, length, depth, 3).tokens);
    }
  // With a fixed number of needles, a longer sequence has no more of them.
  for (const int64_t length : {256, 4096}) {
    const NeedleProbe p = needle_probe(kTask, length, 0.5, 3, 12);
    CHECK(places_of_keys(kTask, p.tokens).size() == 12);
    CHECK(p.needle == needle_probe(kTask, length, 0.5, 3).needle);
  }
  // The filler of a probe differs from training and validation sequences' filler, also in long sequences.
  const DataSplit recall = needle_data(kTask, 0.1);
  for (const int64_t length : {65'536, 131'072})
    for (const auto& source : {recall.train, recall.val}) {
      const NeedleProbe probe = needle_probe(kTask, length, 0, 3);
      const std::vector<int32_t> tokens = sequence_of(*source, 3, 256).tokens;
      int64_t same = 0;
      for (size_t i = 1; i < tokens.size(); ++i) same += tokens[i] == probe.tokens[i];
      CHECK(same < 30);  // a few positions (of 255) have equal tokens by chance
    }
  // A training sequence with fixed depth has a probe's form.
  NeedleTask at_depth = kTask;
  at_depth.depth = 0.5;
  const DataSplit data = needle_data(at_depth, 0);
  CHECK(data.train->count_targets(256) == 2);
  const Sequence s = sequence_of(*data.train, 9, 256);
  CHECK(s.tokens[126] == s.tokens[254]);  // the needle is at position 1 + 250 / 2
  CHECK(s.targets[253] == -1);
  CHECK(s.targets[255] == s.tokens[128]);
}

TEST_CASE("needle: sizes that do not fit are refused, with the value", "[needle]") {
  const auto with = [](auto&& change) {
    NeedleTask task = kTask;
    change(task);
    return task;
  };
  check_error([&] { needle_data(with([](NeedleTask& t) { t.pairs = 34; }), 0); }, {"needle_pairs is 34", "33 keys"});
  check_error([&] { needle_data(with([](NeedleTask& t) { t.seq_len = 178; }), 0); }, {"seq_len is 178", "179 tokens"});
  check_error([] { needle_probe(kTask, 5, 0.5, 0); }, {"length of 5", "6 tokens"});
  check_error([] { needle_probe(kTask, 256, 1.5, 0); }, {"depth is 1.5", "[0, 1]"});
  check_error([] { needle_probe(kTask, 256, NAN, 0); }, {"depth is nan"});
  check_error([] { needle_probe(kTask, 256, 0.5, 0, 34); }, {"--pairs is 34", "33 at most", "of 100 has 33 keys"});
  check_error([] { needle_probe(kTask, 40, 0.5, 0, 12); }, {"--pairs is 12", "61 tokens", "length of 40"});
  const auto refused = [](const std::string& args, const std::string& words) {
    const Outcome outcome = run_program(args);
    INFO(args << ": " << outcome.output);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.output.find(words) != std::string::npos);
  };
  const TemporaryFolder folder;
  const std::string out = "--set log.out_dir=" + folder.file("run");
  refused("train " + kSmall + out + " --set data.needle_pairs=9", "data.needle_pairs is 9");
  refused("train " + kSmall + out + " --set train.seq_len=24", "train.seq_len is 24");
  refused("train " + kSmall + out + " --set data.needle_depth=-0.5", "data.needle_depth is -0.5");
  refused("train " + kSmall + out + " --set data.needle_questions=4", "4 questions for each");
  refused("train " + kSmall + out + " --set data.needle_depth=0.5 --set train.seq_len=8", "train.seq_len is 8");
  refused("train " + kSmall + out + " --set data.needle_value_tokens=3", "3 value tokens");
  CHECK_FALSE(fs::exists(folder.file("run")));
}

TEST_CASE("needle: the grid shows the recall of a simulated model, cell by cell", "[needle]") {
  // A simulated model: it recalls a value if its key is among the last `reach` tokens, but never the value's token with
  // index `unknown`.
  const auto reader = [](int64_t reach, int64_t unknown) {
    return [=](std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t T) {
      std::vector<int32_t> answers;
      for (size_t s = 0; s < tokens.size(); s += static_cast<size_t>(T)) {
        const int64_t question = T - kTask.value_tokens;
        const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(s), end = begin + question;
        const auto found = std::find(begin + std::max<int64_t>(0, question - reach), end, *end);
        for (int64_t j = 0; j < kTask.value_tokens; ++j) {
          CHECK(targets[s + static_cast<size_t>(question + j)] >= 0);
          answers.push_back(found == end || j == unknown ? 0 : *(found + 1 + j));
        }
      }
      return answers;
    };
  };
  const NeedleQuestions questions{.lengths = {256, 64}, .depths = {1, 0.5, 0}, .samples = 7, .batch = 3};
  const NeedleGrid all = measure_needles(kTask, questions, reader(256, -1));
  CHECK(all.lengths == std::vector<int64_t>{64, 256});
  CHECK(all.depths == std::vector<double>{0, 0.5, 1});
  CHECK(all.right == std::vector<int64_t>(6, 7));
  CHECK(all.lowest() == 1);
  for (const int64_t unknown : {0, 1})  // a value counts as recalled only if all its tokens are right
    CHECK(measure_needles(kTask, questions, reader(256, unknown)).right == std::vector<int64_t>(6, 0));
  const NeedleGrid near = measure_needles(kTask, questions, reader(40, -1));
  // At depth 0.5 in 64 tokens the key is 32 tokens back, which is within reach.
  CHECK(near.right == std::vector<int64_t>{0, 0, 7, 0, 7, 7});
  CHECK(near.accuracy(1, 0) == 1);
  CHECK(near.lowest() == 0);
  CHECK(near.table().find("50%    100.0%      0.0%") != std::string::npos);
  CHECK(near.csv().find("\n256,0.5,7,0,0.000000,0\n") != std::string::npos);

  // The SVG is well-formed: elements are closed in order, and no text is taken for a tag.
  const std::string svg = near.svg("a < b & c");
  CHECK(svg.find("a &lt; b &amp; c") != std::string::npos);
  std::vector<std::string> open;
  size_t rects = 0;
  for (size_t at = svg.find('<'); at != std::string::npos; at = svg.find('<', at + 1)) {
    const size_t end = svg.find('>', at);
    REQUIRE(end != std::string::npos);
    const std::string tag = svg.substr(at + 1, end - at - 1), name = tag.substr(0, tag.find(' '));
    CHECK(std::count(tag.begin(), tag.end(), '"') % 2 == 0);
    rects += name == "rect";
    if (name[0] == '/') {
      REQUIRE_FALSE(open.empty());
      CHECK(open.back() == name.substr(1));
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
  }
  CHECK(open.empty());
  CHECK(rects == 6);
}

TEST_CASE("needle: training's loss is the mean over answers, a resume is exact, and eval and report draw the grid",
          "[needle]") {
  const TemporaryFolder folder;
  const std::string run = folder.file("run"), rest = folder.file("rest");
  const std::string train =
      "train " + kSmall + "--set model.tie_embeddings=false --set train.save_every=10 --set train.eval_every=10 ";
  succeed(train + "--set log.out_dir=" + run);
  const std::string csv = read_text(run + "/training.csv");
  const double first_loss = std::stod(csv.substr(csv.find("\n1,") + 3));
  CHECK(first_loss == Approx(std::log(25.0)).margin(0.4));  // the loss is the mean over the 12 positions with a target
  succeed(train + "--set log.out_dir=" + rest + " --resume " + run + "/checkpoints/step_10");
  CHECK(read_text(run + "/model.safetensors") == read_text(rest + "/model.safetensors"));

  const std::string eval = "eval --needle --checkpoint " + run + " --samples 5 --depths 0,0.5,1 ";
  const Outcome grid = succeed(eval + "--lengths 16,64 --batch 2");
  for (const char* word : {"attention: nsa", "16", "64", "50%", "lowest"})
    CHECK(grid.output.find(word) != std::string::npos);
  CHECK(read_text(run + "/needle.svg").find("<svg xmlns=") == 0);
  const std::string table = read_text(run + "/needle.csv");
  CHECK(std::count(table.begin(), table.end(), '\n') == 7);
  succeed(eval + "--lengths 16 --batch 2");  // replaces its own files, and no other program's
  write_text(run + "/needle.csv", "length,thread\n");
  const Outcome theirs = run_program(eval + "--lengths 16");
  CHECK(theirs.exit_code == 1);
  CHECK(theirs.output.find("/needle.csv is not of `triad eval --needle`") != std::string::npos);
  CHECK(read_text(run + "/needle.csv") == "length,thread\n");
  write_text(run + "/needle.csv", table);
  // A file that is named is read, not the folder's model.safetensors: its checksums find the damage.
  std::string damaged = read_text(run + "/model.safetensors");
  damaged.back() = static_cast<char>(~damaged.back());
  write_text(run + "/other.safetensors", damaged);
  const Outcome other = run_program("eval --needle --samples 5 --checkpoint " + run + "/other.safetensors");
  CHECK(other.exit_code == 1);
  CHECK(other.output.find("other.safetensors: tensor") != std::string::npos);
  succeed(eval + "--lengths 16,64 --batch 5 --out " + rest);
  CHECK(read_text(rest + "/needle.csv") == table);  // the batch size does not change the result
  const Json json = Json::parse(succeed(eval + "--json").standard_output);
  CHECK(json["cells"].size() == 12);
  succeed(eval + "--task queries --lengths 5");  // no room for two questions, as many as this run has for each key
  // An unfinished run's grid is written to the run's folder, not to its checkpoint. If that folder is not writable,
  // nothing is measured.
  fs::remove(run + "/model.safetensors");
  for (const char* name : {"/needle.csv", "/needle.svg"}) fs::remove(run + name);
  succeed(eval + "--lengths 16,64");
  CHECK(read_text(run + "/needle.csv") == table);
  CHECK_FALSE(fs::exists(run + "/checkpoints/step_20/needle.csv"));
  write_text(folder.file("a_file"), "");
  const Outcome nowhere = run_program(eval + "--lengths 16 --out " + folder.file("a_file"));
  CHECK(nowhere.exit_code == 1);
  CHECK(nowhere.output.find("a_file: the folder cannot be made") != std::string::npos);
  CHECK(nowhere.output.find("lowest") == std::string::npos);
  fs::create_directories(folder.file("taken/needle.svg"));
  const Outcome taken = run_program(eval + "--lengths 16 --out " + folder.file("taken"));
  CHECK(taken.exit_code == 2);
  CHECK(taken.output.find("taken/needle.svg is a folder") != std::string::npos);
  CHECK(taken.output.find("lowest") == std::string::npos);
  CHECK(std::distance(fs::directory_iterator(folder.file("taken")), {}) == 1);
  succeed("report " + run + " --vs " + rest);
  succeed("report " + run);
  // A report does not replace a pipe or a device.
  REQUIRE(::mkfifo(folder.file("pipe").c_str(), 0600) == 0);
  CHECK(run_program("report " + run + " --out " + folder.file("pipe")).exit_code == 1);
  CHECK(fs::is_fifo(folder.file("pipe")));
  const std::string page = read_text(run + "/report.html");
  CHECK(page.find("Needles recalled, attention: nsa") != std::string::npos);
  write_text(run + "/needle.csv", table.substr(0, table.size() - 1).substr(0, table.rfind('\n', table.size() - 2) + 1));
  const Outcome broken = run_program("report " + run);
  CHECK(broken.exit_code == 1);
  CHECK(broken.output.find("no row for length 64 at depth 1") != std::string::npos);
  write_text(run + "/needle.csv", table + "many,0,5,1,0.2,0\n");
  CHECK(run_program("report " + run).output.find("needle.csv line 8: length is no number") != std::string::npos);

  for (const auto& [args, words] :
       std::map<std::string, std::string>{{eval + "--lengths 3", "a length of 3"},
                                          {eval + "--data x", "--data"},
                                          {"eval --needle --checkpoint " + run + " --depths 1.5", "1.5"},
                                          {"eval --checkpoint " + run, "--needle is required"},
                                          {"eval --checkpoint " + run + " --data x --samples 3", "--needle"}}) {
    const Outcome outcome = run_program(args);
    INFO(args << ": " << outcome.output);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.output.find(words) != std::string::npos);
  }
}

TEST_CASE("needle: train and eval take the config's task, or eval another, and each has its own grid", "[needle]") {
  const TemporaryFolder folder;
  const std::string run = folder.file("run");
  const std::string sizes = "--set data.needle_pairs=2 --set data.needle_occurrences=5 ";
  succeed("train " + kSmall + sizes + "--set data.needle_task=variables --set train.steps=2 --set log.out_dir=" + run);
  const std::string eval = "eval --needle --checkpoint " + run + " --samples 3 --depths 0,1 --lengths 40,64 ";
  const Outcome own = succeed(eval);
  for (const char* word : {"task: variables", "lowest", "overall", "needle_variables.svg"})
    CHECK(own.output.find(word) != std::string::npos);
  const Json json = Json::parse(succeed(eval + "--json").standard_output);
  CHECK(json["task"] == "variables");
  CHECK(json.contains("overall"));
  CHECK(json["cells"].size() == 4);
  CHECK(Json::parse(succeed(eval + "--task counting --json").standard_output)["task"] == "counting");
  succeed(eval + "--task keys");
  // Among the default lengths 8, 16, 32 and 64, only the last holds two questions about three-statement chains.
  const std::string at_begin = "eval --needle --checkpoint " + run + " --samples 1 --depths 0 --json";
  CHECK(Json::parse(succeed(at_begin).standard_output)["cells"].size() == 1);
  for (const char* name : {"needle_variables.csv", "needle_counting.csv", "needle.csv", "needle_counting.svg"})
    CHECK(fs::exists(run + "/" + name));
  CHECK_FALSE(fs::exists(run + "/needle_copy.csv"));
  succeed(eval + "--task copy");  // one question, not the config's two
  CHECK(Json::parse(succeed(eval + "--task keys --pairs 4 --json").standard_output)["pairs"] == 4);
  succeed("report " + run);
  const std::string page = read_text(run + "/report.html");
  for (const char* words : {"Task variables answered, attention: nsa", "Task counting answered", "Needles recalled",
                            "3 sequences a cell, pairs in each: 4<", "3 sequences a cell<"})
    CHECK(page.find(words) != std::string::npos);
  for (const auto& [args, words] : std::map<std::string, std::string>{{"--task copies", "copies"},
                                                                      {"--lengths 29", "length of 29"},
                                                                      {"--task keys --pairs 9", "--pairs is 9"},
                                                                      {"--pairs 1", "--pairs is 1"}}) {
    const Outcome outcome = run_program(eval + args);
    INFO(args << ": " << outcome.output);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.output.find(words) != std::string::npos);
  }
  const Outcome unknown = run_program("train " + kSmall + "--set data.needle_task=maze --set log.out_dir=" + run);
  CHECK(unknown.exit_code == 2);
  CHECK(unknown.output.find("maze") != std::string::npos);
}

TEST_CASE("needle: a small model learns to recall from far outside its window", "[needle]") {
  const TemporaryFolder folder;
  const auto grid_of = [&](const std::string& attention, int steps) {
    const std::string run = folder.file(attention);
    succeed("train " + kSmall + "--set model.init_std=0.18 --set train.lr=5e-3 --set train.micro_batch_size=16 --set " +
            "train.save_every=0 --set train.eval_every=0 --set model.attention=" + attention +
            fmt::format(" --set train.steps={} --set log.out_dir={}", steps, run));
    return Json::parse(succeed("eval --needle --checkpoint " + run + " --samples 40 --batch 40 --lengths 32,64 --json")
                           .standard_output);
  };
  // The window branch covers 8 of 64 tokens, the selection 32 at most. A random guess is right one time in eight.
  const Json grid = grid_of("nsa", 300);
  INFO(grid.dump(1));
  double sum = 0;
  for (const Json& cell : grid["cells"]) sum += cell["accuracy"].get<double>();
  CHECK(grid["cells"].size() == 22);
  CHECK(sum / 22 > 0.85);
  CHECK(grid["lowest"].get<double>() > 0.5);
  // For comparison: dense attention with the same options has not learned the task after 20 steps.
  const Json dense = grid_of("dense", 20);
  CHECK(dense["attention"] == "dense");
  CHECK(dense["cells"].size() == 22);
  CHECK(dense["lowest"].get<double>() < 0.5);
}
