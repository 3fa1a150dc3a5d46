// Whole runs with train.schedule.
#include <map>
#include <string>

#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

TEST_CASE("schedule: a wsd run whose rate has not fallen yet goes on with more steps, to the same bits", "[train]") {
  const TemporaryFolder folder;
  const std::string wsd = "--set train.schedule=wsd ",
                    longer = wsd + "--set train.steps=12 --set train.decay_fraction=0.5 ";
  const std::string whole = run(folder.file("whole"), 1, longer), stable = folder.file("stable");
  run(stable, 1, wsd + "--set train.steps=6 --set train.decay_fraction=0 ");
  run(stable, 1, longer + "--resume latest");
  CHECK(same_file(whole + kWeights, stable + kWeights));
  std::map<int, double> rates = column(stable + "/training.csv", "lr");
  for (int step = 3; step <= 6; ++step) CHECK(rates[step] == Approx(1e-3));  // tiny.json's lr, after two of warm-up
  for (int step = 7; step <= 12; ++step) CHECK(rates[step] == Approx(1e-4 + 9e-4 * (13 - step) / 6.0));
}
