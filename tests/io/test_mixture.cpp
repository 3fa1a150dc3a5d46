// Mixtures: which component each row is drawn from, the rows on any number of ranks and after a resume, and evaluation.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/rng.h"
#include "io/data/best_fit.h"
#include "io/data/loader.h"
#include "io/data/mixture.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// Documents of one letter, of 1 to `longest` bytes: a row's tokens tell its component.
std::shared_ptr<const TokenSource> letters(const TemporaryFolder& folder, char letter, int64_t n, int64_t longest) {
  const Philox random(7, static_cast<uint64_t>(letter));
  std::string text;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t length = 1 + random.below(static_cast<uint64_t>(i), static_cast<uint64_t>(longest));
    text += fmt::format("{{\"text\":\"{}\"}}\n", std::string(length, letter));
  }
  const std::string path = folder.file(std::string(1, letter) + ".jsonl");
  write_text(path, text);
  return text_data({.paths = {path}, .val_paths = {}}, *make_tokenizer("byte")).train;
}

class Letters {
 public:
  explicit Letters(const std::vector<double>& weights) {
    std::vector<std::shared_ptr<const TokenSource>> sources;
    for (size_t i = 0; i < weights.size(); ++i)
      sources.push_back(letters(folder_, static_cast<char>('a' + i), 700 + 900 * static_cast<int64_t>(i), 60));
    mixture = Mixture(sources, shares_of(weights));
  }
  // The component of a row of byte tokens, which are letters and separators.
  static size_t component(const std::vector<int32_t>& tokens) {
    return static_cast<size_t>(*std::max_element(tokens.begin(), tokens.end()) - 'a');
  }

  Mixture mixture;

 private:
  TemporaryFolder folder_;
};

std::string text_of(const Batch& batch) {
  return fmt::format("{} {} {} {} {}", fmt::join(batch.tokens, " "), fmt::join(batch.targets, " "),
                     fmt::join(batch.bounds, " "), batch.step_targets, batch.step_tokens);
}

// text_of() without what the batch says about its step.
std::string of_row(const std::string& text) { return text.substr(0, text.rfind(' ', text.rfind(' ') - 1)); }

}  // namespace

TEST_CASE("mixture: any number of rows has each component's share of them, rounded up or down", "[data][mixture]") {
  const std::vector<double> all_weights[] = {{1},
                                             {1, 1},
                                             {0.7, 0.3},
                                             {3, 2, 5, 1e-3},
                                             {1e9, 1, 1e9},
                                             {1e-300, 3e-300},
                                             {1e300, 1e300},
                                             {0.1, 0.2, 0.3, 0.4},
                                             {9, 1, 1, 1, 1, 1, 1, 1, 1, 1}};
  for (const std::vector<double>& weights : all_weights) {
    INFO(fmt::format("{}", fmt::join(weights, ", ")));
    double sum = 0;
    for (const double weight : weights) sum += weight / 1e9;
    const std::vector<int64_t> shares = shares_of(weights);
    std::vector<int64_t> drawn(weights.size());
    Draws draws(shares), others(shares);
    constexpr int64_t kRows = 10000;
    for (int64_t row = 0; row < kRows; ++row) {
      const Draws::Draw draw = draws(row);
      REQUIRE(draw.number == drawn[draw.component]++);
      for (size_t i = 0; i < weights.size(); ++i) {
        const double due = weights[i] / 1e9 / sum * static_cast<double>(row + 1);
        REQUIRE(std::abs(static_cast<double>(drawn[i]) - due) < 1.01);
      }
      if (row % 997 == 0) REQUIRE(others.counts(row + 1) == drawn);
    }
    for (size_t i = 0; i < weights.size(); ++i)
      CHECK(std::abs(static_cast<double>(drawn[i]) / kRows - weights[i] / 1e9 / sum) < 0.01);
    // From any row, and back.
    for (const int64_t row : {int64_t{9999}, int64_t{0}, int64_t{4096}, int64_t{4095}}) {
      const Draws::Draw one = others(row), again = draws(row);
      CHECK(one.component == again.component);
      CHECK(one.number == again.number);
    }
  }
}

TEST_CASE("mixture: draws repeat every 2^24 rows, and each component's rows go on there", "[data][mixture]") {
  const std::vector<int64_t> shares = shares_of(std::vector<double>{5, 1, 3});
  Draws draws(shares);
  std::vector<int64_t> drawn = draws.counts(kAllShares - 5);
  for (int64_t row = kAllShares - 5; row < kAllShares + 5; ++row) {
    if (row == kAllShares) CHECK(drawn == shares);
    const Draws::Draw draw = draws(row);
    CHECK(draw.number == drawn[draw.component]++);
  }
  CHECK(draws.counts(kAllShares + 5) == drawn);
}

TEST_CASE("mixture: shares sum to all rows, and a weight that is too small has none", "[data][mixture]") {
  CHECK(shares_of(std::vector<double>{3}) == std::vector<int64_t>{kAllShares});
  CHECK(shares_of(std::vector<double>{1, 3}) == std::vector<int64_t>{kAllShares / 4, kAllShares / 4 * 3});
  const std::vector<int64_t> thirds = shares_of(std::vector<double>{1, 1, 1});
  CHECK(thirds[0] + thirds[1] + thirds[2] == kAllShares);
  CHECK(thirds[0] - thirds[2] == 1);
  CHECK(shares_of(std::vector<double>{1, 1e-9})[1] == 0);
}

TEST_CASE("mixture: ranks together read one rank's rows, and a resume goes on with the same ones", "[data][mixture]") {
  constexpr int64_t T = 48, kStep = 8, kSteps = 150;  // several epochs of the smallest component
  const Letters data({0.6, 0.25, 0.15});
  for (const auto& [packing, block] :
       {std::pair{Packing::stream, int64_t{0}}, {Packing::stream, 3 * T}, {Packing::best_fit, int64_t{0}}}) {
    INFO((packing == Packing::stream ? "stream" : "best_fit") << ", block " << block);
    LoaderOptions options{.seq_len = T,
                          .micro_batch = 1,
                          .micro_steps = kStep,
                          .block = block,
                          .packing = packing,
                          .max_documents = 8,
                          .seed = 3,
                          .within = true};
    std::vector<std::string> rows;
    std::vector<RowGroups> groups;
    std::vector<int64_t> drawn(3);
    Loader whole(data.mixture, options);
    for (int64_t i = 0; i < kSteps * kStep; ++i) {
      const Batch batch = whole.next();
      rows.push_back(text_of(batch));
      groups.push_back(batch.groups);
      const size_t component = Letters::component(batch.tokens);
      ++drawn[component];
      // All rows of a block are of one component.
      if (block > 0) CHECK(component == Draws(data.mixture.shares())(i * T / block).component);
    }
    const std::vector<int64_t> due = {720, 300, 180};
    for (size_t i = 0; i < due.size(); ++i) CHECK(std::abs(drawn[i] - due[i]) <= (block > 0 ? 3 : 1));
    CHECK(std::set<std::string>(rows.begin(), rows.end()).size() > 200);
    for (const int64_t world : {2, 4})
      for (int64_t rank = 0; rank < world; ++rank) {
        LoaderOptions part = options;
        part.rank = rank, part.world = world, part.micro_steps = kStep / world;
        Loader loader(data.mixture, part);
        for (int64_t step = 0; step < 20; ++step)
          for (int64_t i = 0; i < part.micro_steps; ++i)
            REQUIRE(text_of(loader.next()) == rows[static_cast<size_t>(step * kStep + rank * part.micro_steps + i)]);
      }
    for (const int64_t step : {1, 77, 149})
      for (const bool knows : {false, true}) {
        LoaderOptions later = options;
        later.first_sequence = step * kStep;
        if (knows) later.known = groups[static_cast<size_t>(step * kStep - 1)];
        Loader loader(data.mixture, later);
        for (int64_t i = step * kStep; i < std::min(kSteps, step + 3) * kStep; ++i)
          REQUIRE(text_of(loader.next()) == rows[static_cast<size_t>(i)]);
      }
    // The first component's rows are those that it has alone.
    Loader alone(data.mixture.sources()[0], options);
    for (const std::string& row : rows) {
      if (row.find("97 97") == std::string::npos) continue;
      REQUIRE(of_row(row) == of_row(text_of(alone.next())));
      if (alone.cursor() > 300) break;
    }
  }
}

TEST_CASE("mixture: each component has an order of its own", "[data][mixture]") {
  const Letters data({0.5, 0.5});
  const auto& source = data.mixture.sources()[1];
  for (const Packing packing : {Packing::stream, Packing::best_fit}) {
    const auto rows = make_rows(Mixture({source, source}, shares_of(std::vector<double>{1, 1})),
                                {.seq_len = 48, .packing = packing, .max_documents = 8, .seed = 5});
    int equal = 0;
    std::vector<int32_t> tokens(48), targets(48), other(48);
    for (int64_t k = 0; k < 20; k += 2) {
      Row row{tokens, targets}, next{other, targets};
      rows->read(k, row);
      rows->read(k + 1, next);
      equal += tokens == other;
    }
    CHECK(equal <= 2);
  }
}

TEST_CASE("mixture: a resume in packed rows knows a group of each component, and packs none before",
          "[data][mixture]") {
  constexpr int64_t T = 32;
  const Letters data({0.5, 0.5});
  const RowOptions options{.seq_len = T, .packing = Packing::best_fit, .max_documents = 8, .seed = 5, .within = true};
  const auto rows = make_rows(data.mixture, options);
  constexpr int64_t kFar = 6000;
  const RowGroups groups = rows->groups_of(kFar);
  REQUIRE(groups.size() == 2);
  CHECK(std::min(groups[0].group, groups[1].group) >= 1);
  CHECK(groups[0].group != groups[1].group);
  RowOptions knows = options;
  knows.known = groups;
  const auto later = make_rows(data.mixture, knows);
  std::vector<int32_t> tokens(T), targets(T), more_tokens(T), more_targets(T);
  Row row{tokens, targets}, other{more_tokens, more_targets};
  for (int64_t k = kFar; k < kFar + 10; ++k) {
    rows->read(k, row);
    later->read(k, other);
    CHECK(tokens == more_tokens);
    CHECK(targets == more_targets);
  }
  CHECK(later->groups_packed() <= 4);
  CHECK(rows->groups_packed() > 4);
}

TEST_CASE("mixture: an evaluation draws by the shares, each component in order, until one ends", "[data][mixture]") {
  constexpr int64_t T = 48;
  const Letters data({0.75, 0.25});
  const int64_t first = count_sequences(*data.mixture.sources()[0], T);
  const int64_t batches = count_validation_batches(data.mixture, T, 4, 1'000'000);
  CHECK(batches == (first * 4 / 3) / 4 + 1);  // the first component ends
  CHECK(count_validation_batches(data.mixture, T, 4, 3) == 3);
  std::vector<int64_t> drawn(2);
  for (int64_t i = 0; i < batches; ++i) {
    const Batch batch = validation_batch(data.mixture, T, 4, i, true);
    CHECK((batch.rows == 4 || i + 1 == batches));
    for (int64_t r = 0; r < batch.rows; ++r) {
      const std::vector<int32_t> row(batch.tokens.begin() + r * T, batch.tokens.begin() + (r + 1) * T);
      const size_t component = Letters::component(row);
      std::vector<int32_t> expected(T);
      data.mixture.sources()[component]->read(drawn[component]++ * T, expected);
      CHECK(row == expected);
    }
  }
  CHECK(drawn[0] == first);
  CHECK(std::abs(3 * drawn[1] - drawn[0]) <= 4);
}
