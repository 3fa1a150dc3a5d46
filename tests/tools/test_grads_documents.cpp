// triad grads --documents FILE: what it writes for a packed row, and the files that it refuses.
#include <cmath>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "tests/support/grads_run.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

using Bounds = std::vector<int32_t>;

constexpr int64_t kSeq = 48;

// An initialized model and a token shard, with the command that runs both.
struct Setup {
  TemporaryFolder folder;
  std::string bounds = folder.file("bounds.i32"), out = folder.file("g.safetensors");
  std::vector<int32_t> tokens;

  Setup() {
    REQUIRE(run_program("init " + kTiny + " --out " + folder.file("init")).exit_code == 0);
    for (int32_t i = 0; i <= kSeq; ++i) tokens.push_back((i * i + 3 * i + 5) % 256);
    write_shard(folder.file("tokens.bin"), tokens);
  }
  std::string command(const std::string& shard, int64_t seq, const std::string& to, int64_t batch = 1) const {
    return "grads --device cpu --dtype f64 --checkpoint " + folder.file("init") + " --tokens " + folder.file(shard) +
           " --seq " + std::to_string(seq) + " --out " + to + " --batch " + std::to_string(batch);
  }
  Outcome packed(int64_t batch = 1) const {
    return run_program(command("tokens.bin", kSeq, out, batch) + " --documents " + bounds);
  }
  // Results for tokens [from, to) alone. The last token has no target.
  std::map<std::string, GradsEntry> alone(int32_t from, int32_t to) {
    write_bounds(folder.file("one.i32"), {0, to - from});
    write_shard(folder.file("one.bin"),
                std::span(tokens).subspan(static_cast<size_t>(from), static_cast<size_t>(to - from + 1)));
    const Outcome outcome = run_program(command("one.bin", to - from, folder.file("one.safetensors")) +
                                        " --documents " + folder.file("one.i32"));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return read_grads(folder.file("one.safetensors"));
  }
};

}  // namespace

TEST_CASE("grads: --documents gives the loss, logits, lists and gradients of the documents alone", "[tools]") {
  Setup setup;
  const Bounds bounds = {0, 20, 21, 48};
  write_bounds(setup.bounds, bounds);
  const Outcome outcome = setup.packed();
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const std::map<std::string, GradsEntry> packed = read_grads(setup.out);
  // A document with n tokens has n - 1 targets, and the row mean weighs by them. A one-token document has none, so only
  // its logits and lists are compared, with the token's before any other.
  const double targets = 19 + 26;
  double loss = 0;
  std::map<std::string, std::vector<double>> grads;
  std::vector<double> logits;
  std::map<std::string, std::vector<int32_t>> lists;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    const int32_t from = bounds[i], to = bounds[i + 1];
    // A one-token document has no target when alone, so it gets one more token. Row 0 does not attend to it.
    const std::map<std::string, GradsEntry> one = to - from > 1 ? setup.alone(from, to) : setup.alone(from, to + 1);
    const auto part = static_cast<size_t>(to - from), rows = to - from > 1 ? part : part + 1;
    for (const auto& [name, entry] : one) {
      if (name == "logits")
        logits.insert(logits.end(), entry.floats.begin(),
                      entry.floats.begin() + static_cast<std::ptrdiff_t>(entry.floats.size() / rows * part));
      if (name.starts_with("block_index/"))
        lists[name].insert(lists[name].end(), entry.ids.begin(),
                           entry.ids.begin() + static_cast<std::ptrdiff_t>(entry.ids.size() / rows * part));
      if (to - from == 1) continue;
      const double weight = static_cast<double>(to - from - 1) / targets;
      if (name == "loss") loss += weight * entry.floats.at(0);
      if (!name.starts_with("grad/")) continue;
      grads[name].resize(entry.floats.size());
      for (size_t j = 0; j < entry.floats.size(); ++j) grads[name][j] += weight * entry.floats[j];
    }
  }
  CHECK(packed.at("loss").floats.at(0) == Approx(loss).epsilon(1e-12));
  CHECK(norm_of_difference(packed.at("logits").floats, logits) <= 1e-11);
  CHECK(packed.at("logits").shape == std::vector<int64_t>{1, kSeq, 256});
  REQUIRE(lists.size() == 2);
  for (const auto& [name, ids] : lists) CHECK(packed.at(name).ids == ids);
  REQUIRE(grads.size() > 20);
  for (const auto& [name, values] : grads) {
    INFO(name);
    CHECK(norm_of_difference(packed.at(name).floats, values) <=
          1e-10 * norm_of_difference(values, std::vector<double>(values.size())) + 1e-13);
  }
  // Without --documents the row is one sequence, and its result another.
  REQUIRE(run_program(setup.command("tokens.bin", kSeq, setup.out)).exit_code == 0);
  CHECK(read_grads(setup.out).at("loss").floats != packed.at("loss").floats);
}

TEST_CASE("grads: files of bounds that do not divide the row are refused with the value", "[tools]") {
  const Setup setup;
  const auto refused = [&](const std::vector<std::string>& words, int64_t batch = 1) {
    const Outcome outcome = setup.packed(batch);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.output.find(setup.bounds) != std::string::npos);
    for (const std::string& word : words) {
      INFO(word);
      CHECK(outcome.output.find(word) != std::string::npos);
    }
    CHECK_FALSE(fs::exists(setup.out));
  };
  const auto with = [&](const Bounds& bounds, const std::vector<std::string>& words) {
    write_bounds(setup.bounds, bounds);
    refused(words);
  };
  with({}, {"nothing"});
  with({0}, {"at least one more"});
  with({1, 48}, {"begin with 1"});
  with({-1, 48}, {"begin with -1"});
  with({0, 30, 20, 48}, {"bound 1 is 30", "bound 2 is 20", "ascend"});
  with({0, 20, 20, 48}, {"bound 1 is 20", "bound 2 is 20", "ascend"});
  with({0, -5, 48}, {"bound 1 is -5"});
  with({0, 49}, {"bound 1 is 49", "beyond the end"});
  with({0, 20, 47}, {"last bound is 47", "48"});
  with(Bounds(50, 0), {"50 bounds", "48 tokens"});
  write_bounds(setup.bounds, {0, 20, 48}, 2);
  refused({"10 bytes"});
  write_bounds(setup.bounds, {0, 20, 48});
  refused({"--batch is 2"}, 2);
  // A row with single-token documents has no target.
  Bounds single(kSeq + 1);
  for (int32_t i = 0; i <= kSeq; ++i) single[static_cast<size_t>(i)] = i;
  write_bounds(setup.bounds, single);
  const Outcome none = setup.packed();
  INFO(none.output);
  CHECK(none.exit_code == 1);
  CHECK(none.output.find("no position") != std::string::npos);
  fs::remove(setup.bounds);
  const Outcome missing = setup.packed();
  CHECK(missing.exit_code == 1);
  CHECK(missing.output.find(setup.bounds) != std::string::npos);
}
