// triad eval by position and against another checkpoint: the ranges, the difference's standard error, what is refused.
#include <fmt/format.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "io/data/position_losses.h"
#include "io/file.h"
#include "tests/support/dist_run.h"
#include "tests/support/report_page.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

double position_loss(int64_t position) { return 1 + 0.5 * std::sin(static_cast<double>(position)); }

Json eval_json(const std::string& args) {
  const Outcome outcome = run_program("eval --device cpu --json " + args);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return parse_json(outcome.standard_output.substr(outcome.standard_output.find('{')), "eval");
}

}  // namespace

TEST_CASE("eval: ranges of positions double, and count from a document's beginning only if attention does", "[tools]") {
  const DocumentIndex index{.begins = {0, 1, 3001, 13001}, .size = 60000};
  for (const bool within : {false, true})
    for (const int64_t T : {100, 2048, 2049, 12000, 60000}) {
      INFO("T = " << T << (within ? ", within documents" : ""));
      PositionLosses losses(T, within ? &index : nullptr);
      std::vector<double> sum(6);
      std::vector<int64_t> count(6);
      for (int64_t i = 0; i < index.size; ++i) {
        if (i % 7 == 3) continue;  // a token without a target
        losses.add(i, position_loss(i));
        int64_t seen = i % T;
        for (const int64_t begin : index.begins)
          if (within && begin <= i) seen = std::min(seen, i - begin);
        size_t range = 0;
        for (int64_t end = 2048; seen >= end; end *= 2) ++range;
        sum[range] += position_loss(i), ++count[range];
      }
      const Json json = losses.json();
      size_t at = 0;
      for (size_t range = 0; range < sum.size(); ++range) {
        if (count[range] == 0) continue;
        REQUIRE(at < json.size());
        const Json& one = json[at++];
        CHECK(one["from"] == (range == 0 ? 0 : 1024 << range));
        CHECK(one["to"] == std::min<int64_t>(2048 << range, T));
        CHECK(one["positions"] == count[range]);
        CHECK(one["loss"].get<double>() == Approx(sum[range] / static_cast<double>(count[range])));
      }
      CHECK(at == json.size());
    }
}

TEST_CASE("eval: the difference of two models has the standard error of a ratio over rows", "[tools]") {
  // 4-token rows; the second row's third token has no target.
  // Differences by row: 1 + 2 + 3 + 4, 5 + 6 + 7, 2 * 4.
  const std::vector<double> differences = {1, 2, 3, 4, 5, 6, 0, 7, 2, 2, 2, 2};
  PositionLosses a(4, nullptr), b(4, nullptr), fewer(4, nullptr);
  for (int64_t i = 0; i < 12; ++i) {
    if (i == 6) continue;
    b.add(i, 10 + static_cast<double>(i));
    a.add(i, 10 + static_cast<double>(i) + differences[static_cast<size_t>(i)]);
    if (i != 9) fewer.add(i, 1);
  }
  const PositionLosses::Difference d = a.minus(b);
  const double mean = 36.0 / 11;
  CHECK(d.rows == 3);
  CHECK(d.mean == Approx(mean));
  const double squares = std::pow(10 - 4 * mean, 2) + std::pow(18 - 3 * mean, 2) + std::pow(8 - 4 * mean, 2);
  CHECK(d.standard_error == Approx(std::sqrt(1.5 * squares) / 11));
  CHECK(b.minus(a).mean == Approx(-mean));
  const Json range = a.json(&b)[0];
  CHECK(range["difference"].get<double>() == Approx(mean));
  CHECK(range["standard_error"].get<double>() == Approx(d.standard_error));
  CHECK(range["against_loss"].get<double>() == Approx((66.0 - 6 + 110) / 11));
  PositionLosses one(4, nullptr);
  one.add(2, 1);
  CHECK(std::isnan(one.minus(one).standard_error));
  check_error([&] { a.minus(fewer); }, {"row 2 has 4 predictions", "3"});
}

TEST_CASE("eval: --against evaluates two checkpoints on the same tokens", "[tools]") {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 2000; ++i) text += fmt::format("{} ", i * i % 977);
  text.resize(5000);
  write_text(folder.file("text.txt"), text);
  const std::string own_text = "--set data.kind=text --set 'data.paths=[\"" + folder.file("text.txt") + "\"]' ";
  const std::string a = run(folder.file("a"), 1, "--set train.steps=2 "),
                    b = run(folder.file("b"), 1, "--set train.steps=2 --set train.seed=5 "),
                    within = run(folder.file("c"), 1, own_text + "--set train.steps=1 ");
  const std::string data = " --seq 2500 --batch 1 --data " + folder.file("text.txt") + " --checkpoint ";
  const Json both = eval_json(data + a + " --against " + b), other = eval_json(data + b);
  CHECK(both["against"]["loss"] == other["loss"]);
  CHECK(both["against"]["rows"] == 2);
  const double difference = both["against"]["difference"];
  CHECK(difference == Approx(both["loss"].get<double>() - other["loss"].get<double>()).margin(1e-9));
  CHECK(both["against"]["standard_error"].get<double>() > 0);
  const Json& ranges = both["by_position"];
  REQUIRE(ranges.size() == 2);
  CHECK(ranges[0]["positions"] == 2 * 2048);
  CHECK(ranges[1]["from"] == 2048);
  CHECK(ranges[1]["to"] == 2500);
  CHECK(ranges[1]["positions"] == 2 * 452);
  for (size_t i = 0; i < 2; ++i) CHECK(ranges[i]["against_loss"] == other["by_position"][i]["loss"]);

  const Json same = eval_json(data + a + " --against " + a);
  CHECK(same["against"]["difference"] == 0.0);
  const Outcome lines = run_program("eval --device cpu" + data + a + " --against " + b);
  CHECK(has(lines.output, "against " + b + ": loss "));
  CHECK(has(lines.output, "2k to 2500"));
  const Outcome refused = run_program("eval --device cpu" + data + a + " --against " + within);
  CHECK(refused.exit_code == 1);
  CHECK(has(refused.output, "its data.documents is attend_within, and that of " + a + " is attend_across"));

  // A file that cannot be written is an error before the evaluation.
  for (const auto& [option, code, words] : std::vector<std::tuple<std::string, int, std::string>>{
           {"--per-position " + folder.path(), 2, folder.path() + " is a folder"},
           {"--per-document " + folder.file("none/a.csv"), 1, "none/a.csv: cannot be written"},
           {fmt::format("--per-document {0}/a.csv --per-position {0}/../{1}/a.csv", folder.path(),
                        folder.path().substr(folder.path().rfind('/') + 1)),
            2, "are the same file"},
           {"--against ''", 2, "--against: a path is needed"}}) {
    const Outcome outcome = run_program("eval --device cpu" + data + a + " " + option);
    INFO(outcome.output);
    CHECK(outcome.exit_code == code);
    CHECK(has(outcome.output, words));
    CHECK_FALSE(has(outcome.output, "perplexity"));
  }

  // The CSV file has --checkpoint's losses, and its run's report draws them.
  const std::string csv = a + "/positions.csv";
  eval_json(data + a + " --against " + b + " --per-position " + csv);
  const std::string table = read_text(csv);
  CHECK(table.starts_with("from,to,positions,loss,perplexity\n0,2048,4096,"));
  CHECK(has(table, fmt::format("\n2048,2500,904,{:.9g},", ranges[1]["loss"].get<double>())));
  const Json points = data_of(report(a)).at(0)["positions"];
  REQUIRE(points.size() == 2);
  CHECK(points[0][0] == 2048);
  CHECK(points[1][0] == 2500);
  CHECK(points[1][1].get<double>() == Approx(ranges[1]["loss"].get<double>()));
  CHECK(data_of(report(b)).at(0)["positions"].empty());
  write_text(csv, table + "0,2048,1,2,3\n");
  const Outcome broken = run_program("report " + a);
  CHECK(broken.exit_code == 1);
  CHECK(has(broken.output, "positions.csv line 4: a range of positions ends at 2048"));
}

TEST_CASE("eval: --sparse-layers has the losses with which runs with one sparse layer begin", "[tools]") {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 1000; ++i) text += fmt::format("{} ", i * i % 977);
  write_text(folder.file("text.txt"), text);
  const std::string layers = "--set model.n_layers=3 --set nsa.phi=mlp ",
                    data = " --batch 1 --data " + folder.file("text.txt");
  const std::string dense =
      run(folder.file("dense"), 1, layers + "--set model.attention=dense --set train.steps=4 --set train.lr=1e-2 ");
  const Json json = eval_json("--sparse-layers --checkpoint " + dense + data);
  REQUIRE(json["sparse_layers"].size() == 3);
  const std::vector<std::string> others = {"1:3", "0:1,2:3", "0:2"};
  double last = INFINITY;
  for (const Json& one : json["sparse_layers"]) {
    const auto layer = one["layer"].get<size_t>();
    INFO("layer " << layer);
    // A rate that changes no weight.
    const std::string begun =
        run(folder.file("begun"), 1,
            layers + "--overwrite --set train.steps=1 --set train.lr=1e-30 --set train.init_from=" + dense +
                " --set model.dense_layers=" + others.at(layer) + " ");
    CHECK(one["loss"].get<double>() ==
          Approx(eval_json("--checkpoint " + begun + data)["loss"].get<double>()).epsilon(1e-7));
    CHECK(one["loss"] != json["loss"]);
    CHECK(one["loss"].get<double>() <= last);
    last = one["loss"];
  }
  const Outcome lines = run_program("eval --device cpu --sparse-layers --checkpoint " + dense + data);
  CHECK(has(lines.output, "sparse layer      loss  difference"));
  const Outcome refused = run_program("eval --device cpu --sparse-layers --checkpoint " + folder.file("begun") + data);
  CHECK(refused.exit_code == 2);
  CHECK(has(refused.output, "begun has NSA: a model whose layers are all dense is needed"));
}
