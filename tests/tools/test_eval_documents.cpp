// triad eval by document and by position in it: what a token's position is, rows past 2,048 tokens, and
// --per-document's file.
#include <fmt/format.h>

#include <cmath>
#include <map>
#include <sstream>
#include <vector>

#include "io/data/document_losses.h"
#include "io/data/shards.h"
#include "io/file.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// The loss that a prediction has in these tests.
double loss_at(int64_t position) { return 1 + 0.5 * std::sin(static_cast<double>(position)); }

std::vector<std::vector<double>> rows_of_csv(const std::string& text) {
  std::istringstream in(text);
  std::string line, cell;
  std::getline(in, line);
  CHECK(line == "document,first_token,tokens,positions,loss,ppl");
  std::vector<std::vector<double>> rows;
  while (std::getline(in, line)) {
    std::istringstream cells(line);
    for (rows.emplace_back(); std::getline(cells, cell, ',');) rows.back().push_back(std::stod(cell));
    REQUIRE(rows.back().size() == 6);
  }
  return rows;
}

struct Sum {
  double loss = 0;
  int64_t positions = 0;
  void add(double one_loss) { loss += one_loss, ++positions; }
  double mean() const { return loss / static_cast<double>(positions); }
};

}  // namespace

TEST_CASE("eval: positions count from the document's beginning in its row, past 2,048 tokens too", "[tools]") {
  // Documents with 1, 3,000, 10,000 and 46,999 tokens, in rows of 2,048, 12,000 and 60,000.
  const DocumentIndex index{.begins = {0, 1, 3001, 13001}, .size = 60000};
  for (const int64_t T : {2048, 12000, 60000}) {
    INFO("T = " << T);
    DocumentLosses losses(index, T);
    std::map<int64_t, Sum> ranges;  // first position -> sum
    std::vector<Sum> documents(4);
    for (int64_t i = 0; i < index.size; ++i) {
      if (i % 7 == 3) continue;  // a token without a target
      losses.add(i, loss_at(i));
      int64_t document = 0, seen = 0;
      while (document < 3 && index.begins[document + 1] <= i) ++document;
      for (int64_t j = i; j > index.begins[document] && j % T != 0; --j) ++seen;
      ranges[seen < 2048 ? 0 : seen < 8192 ? 2048 : seen < 32768 ? 8192 : 32768].add(loss_at(i));
      documents[static_cast<size_t>(document)].add(loss_at(i));
    }
    const Json json = losses.json();
    CHECK(json["documents"] == 4);
    REQUIRE(json["by_position"].size() == ranges.size());
    CHECK(ranges.size() == (T == 2048 ? 1 : T == 12000 ? 3 : 4));
    size_t at = 0;
    for (const auto& [from, sum] : ranges) {
      const Json& range = json["by_position"][at++];
      CHECK(range["from"] == from);
      CHECK(range["positions"] == sum.positions);
      CHECK(range["loss"].get<double>() == Approx(sum.mean()));
      CHECK(range["ppl"].get<double>() == Approx(std::exp(sum.mean())));
    }
    const auto rows = rows_of_csv(losses.csv());
    REQUIRE(rows.size() == 4);
    double mean = 0;
    for (size_t i = 0; i < 4; ++i) {
      const auto number = static_cast<int64_t>(i);
      CHECK(rows[i][0] == static_cast<double>(i));
      CHECK(rows[i][1] == static_cast<double>(index.begins[i]));
      CHECK(rows[i][2] == static_cast<double>(index.length(number)));
      CHECK(rows[i][3] == static_cast<double>(documents[i].positions));
      CHECK(rows[i][4] == Approx(documents[i].mean()).epsilon(1e-5));
      CHECK(rows[i][5] == Approx(std::exp(documents[i].mean())).epsilon(1e-5));
      mean += documents[i].mean() / 4;
    }
    CHECK(json["mean_loss"].get<double>() == Approx(mean));
    CHECK(losses.table().find(T == 2048 ? "0 to 2k" : "8k to 32k") != std::string::npos);
    CHECK((losses.table().find("2k to 8k") == std::string::npos) == (T == 2048));
  }
}

TEST_CASE("eval: a document without a prediction has no row, and does not count", "[tools]") {
  const DocumentIndex index{.begins = {0, 5, 6, 9}, .size = 12};
  DocumentLosses losses(index, 12);
  losses.add(2, 1.0);
  losses.add(7, 3.0);
  CHECK(losses.json()["documents"] == 2);
  CHECK(losses.json()["mean_loss"] == 2.0);
  CHECK(losses.csv() ==
        "document,first_token,tokens,positions,loss,ppl\n0,0,5,1,1.000000,2.718282\n2,6,3,1,3.000000,20.085537\n");
}

TEST_CASE("eval: --per-document writes a row for each text, and rows of 3,000 tokens reach the range 2k to 8k",
          "[tools]") {
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, "--set train.steps=2 ");
  std::string text;
  for (int i = 0; i < 1000; ++i) text += fmt::format("{} ", i * i % 977);
  text.resize(3600);
  write_text(folder.file("a.txt"), text);
  write_text(folder.file("b.txt"), text.substr(7, 40));
  const std::string csv = folder.file("losses.csv"),
                    args = "eval --device cpu --json --batch 1 --checkpoint " + out + " --per-document " + csv + " ";
  const Outcome outcome = run_program(args + "--seq 3000 --data '" + folder.file("*.txt") + "'");
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const Json json = parse_json(outcome.standard_output.substr(outcome.standard_output.find('{')), "eval");
  // a.txt is the tokens [0, 3601), b.txt the tokens [3601, 3642): row 0 holds 3,000 from a.txt, row 1 the other 601.
  const Json& ranges = json["by_document"]["by_position"];
  REQUIRE(ranges.size() == 2);
  CHECK(ranges[0]["positions"] == 2048 + 641);
  CHECK(ranges[1]["from"] == 2048);
  CHECK(ranges[1]["positions"] == 3000 - 2048);
  const auto rows = rows_of_csv(read_file(csv));
  REQUIRE(rows.size() == 2);
  CHECK(std::vector(rows[0].begin(), rows[0].begin() + 4) == std::vector<double>{0, 0, 3601, 3601});
  CHECK(std::vector(rows[1].begin(), rows[1].begin() + 4) == std::vector<double>{1, 3601, 41, 40});
  CHECK((rows[0][4] * 3601 + rows[1][4] * 40) / 3641 == Approx(json["loss"].get<double>()).epsilon(1e-5));

  ShardWriter bare(folder.file("bare.bin"), TokenWidth::u16);  // no manifest says where its documents begin
  bare.append(std::vector<int32_t>(100, 7));
  bare.finish();
  const Outcome refused = run_program(args + "--data " + folder.file("bare.bin"));
  CHECK(refused.exit_code == 1);
  CHECK(refused.output.find("--per-document " + csv) != std::string::npos);
  const Outcome needle = run_program("eval --needle --checkpoint " + out + " --per-document " + csv);
  CHECK(needle.exit_code == 2);
}
