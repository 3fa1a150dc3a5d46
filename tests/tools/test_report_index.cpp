// triad report on runs with a taught index: loss, recall and logits by layer, recall by distance; no cards of gates
// where there are none.
#include <fmt/format.h>

#include <filesystem>
#include <string>

#include "tests/support/dist_run.h"
#include "tests/support/report_page.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kThree = "--set nsa.selector=index --set nsa.d_index=4 --set train.eval_every=8 ",
                  kOneSoftmax = kThree + "--set nsa.branches=sel ";

}  // namespace

TEST_CASE("report: a taught index's tables become maps by step, layer and distance", "[report]") {
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, kOneSoftmax);
  const std::string page = report(out);
  const Json data = data_of(page).at(0), index = data["index"];
  CHECK(index["index_loss"]["steps"].size() == 20);
  for (const char* at_evaluations : {"recall", "max_logit"}) {
    CHECK(index[at_evaluations]["steps"] == Json({8, 16, 20}));
    CHECK(index[at_evaluations]["layers"] == Json({0, 1}));
  }
  const std::string row = lines(out + "/index.csv").back(), cut = row.substr(0, row.rfind(','));
  const double recall = std::stod(cut.substr(cut.rfind(',') + 1));  // step 20, layer 1
  CHECK(index["recall"]["values"][1][2].get<double>() == Approx(recall).margin(1e-9));
  const Json& distances = index["distances"];
  CHECK(distances["step"] == 20);
  CHECK(distances["layers"] == Json({0, 1}));
  CHECK(distances["distances"] == Json({0, 1, 2, 4, 8, 16, 32}));
  double mass = 0, held = 0;
  for (size_t i = 0; i < 7; ++i) {
    mass += distances["mass"][1][i].get<double>();
    held += distances["mass"][1][i].get<double>() * distances["recall"][1][i].get<double>();
  }
  CHECK(mass == Approx(1).margin(1e-5));
  CHECK(held == Approx(recall).margin(1e-5));
  CHECK(data["ranks"][0]["lines"]["index_loss"].size() == 20);
  // Evaluations are no events, and do not hide that the run is complete.
  for (const Json& event : data["events"]) CHECK(event["kind"] != "evaluation");
  CHECK(has(page, "complete"));
  for (const auto& [key, heat] : data["gates"].items()) CHECK(heat.is_null());
  CHECK_FALSE(data["ranks"][0]["lines"].contains("gate_dead_frac"));

  // Rows without values leave gaps, and tables without rows no map.
  write_text(out + "/index.csv", "step,layer,index_loss,recall,max_logit\n2,1,0.5,,\n4,1,,0.75,3\n");
  write_text(out + "/index_recall.csv",
             "step,layer,distance,mass,recall\n2,1,0,1,1\n4,1,0,0.25,1\n4,1,4,0.5,0.5\n4,3,4,0.5,\n4,3,8,x,0\n");
  const Json sparse = data_of(report(out)).at(0)["index"];
  CHECK(sparse["index_loss"]["steps"] == Json({2}));
  CHECK(sparse["recall"]["values"] == Json::array({Json::array({0.75})}));
  CHECK(sparse["distances"] == Json({{"step", 4},
                                     {"layers", {1, 3}},
                                     {"distances", {0, 4, 8}},
                                     {"mass", {{0.25, 0.5, nullptr}, {nullptr, 0.5, nullptr}}},
                                     {"recall", {{1, 0.5, nullptr}, {nullptr, nullptr, 0}}}}));
  fs::remove(out + "/index_recall.csv");
  write_text(out + "/index.csv", "step,layer,index_loss,recall,max_logit\n2,1,0.5,,\n");
  const Json without = data_of(report(out)).at(0)["index"];
  for (const char* absent : {"recall", "max_logit", "distances"}) CHECK(without[absent].is_null());
  fs::remove(out + "/index.csv");
  CHECK(data_of(report(out)).at(0)["index"].is_null());
  fs::remove(out + "/report.html");
  check_report_refused(out, "index.csv", "step,layer,loss\n2,1,0.5\n");
}

TEST_CASE("report: a browser draws the charts of a taught index, and none of gates without gates", "[report]") {
  if (!require_browser()) return;
  const TemporaryFolder folder;
  const std::string sel = run(folder.file("sel"), 1, kOneSoftmax), three = run(folder.file("three"), 1, kThree),
                    compressed = run(folder.file("compressed"), 1, "--set train.eval_every=8 ");
  const auto cards = {"Index</h2>",         "Index loss by layer",         "Recall by layer", "Largest attention logit",
                      "Recall by distance", "Recall by layer and distance"};
  const std::string one = drawn(folder, report(sel)), two = drawn(folder, report(three + " --vs " + sel));
  for (const char* text : cards) {
    CHECK(has(one, text));
    CHECK(has(two, text));
  }
  for (const char* text : {"recall A", "recall B"}) CHECK(has(two, text));
  CHECK_FALSE(has(one, "Gates</h2>"));
  CHECK(has(two, "Gates</h2>"));
  const std::string none = drawn(folder, report(compressed));
  CHECK(has(none, "Gates</h2>"));
  CHECK_FALSE(has(none, "Index</h2>"));
}
