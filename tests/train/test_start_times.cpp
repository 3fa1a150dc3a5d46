// A run's start times: phases since the process started, in the banner, the log and metrics.json.
#include <chrono>
#include <cmath>
#include <string>
#include <thread>

#include "engine/process/start_times.h"
#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

TEST_CASE("start times: phases leave no time out, and begin at the start of the process", "[train]") {
  struct Fixed {  // like TrainStep, it can be neither copied nor moved
    explicit Fixed(int n) : number(n) {}
    Fixed(const Fixed&) = delete;
    int number;
  };
  const auto began = std::chrono::steady_clock::now();
  StartTimes times;
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const Fixed made = times.during("make", [] { return Fixed(7); });
  times.ends("none");
  const double since = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  CHECK(made.number == 7);
  REQUIRE(times.phases().size() == 3);
  CHECK(times.phases()[0].name == "program");
  CHECK((times.phases()[0].seconds > 0 && times.phases()[0].seconds < 24 * 3600));
  CHECK(times.phases()[1].name == "make");
  CHECK(times.phases()[1].seconds >= 0.03);  // the time before during() is in its phase
  CHECK(times.phases()[2].seconds < 0.03);
  const double after = times.seconds() - times.phases()[0].seconds;
  CHECK((after >= 0.03 && after <= since));
  CHECK(times.text(1) == fmt::format("{:.2f} s: make {:.2f}", times.seconds(), times.phases()[1].seconds));
}

TEST_CASE("start times: a process that was just started is young", "[train]") {
  const TemporaryFolder folder;
  const auto began = std::chrono::steady_clock::now();
  const Outcome outcome = run_program("train " TRIAD_SOURCE_DIR
                                      "/configs/tiny.json --set runtime.device=cpu --set "
                                      "train.save_every=10 --set log.out_dir=" +
                                      folder.file("run"));
  const double all = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.output.find("\nstart    ") != std::string::npos);
  CHECK(outcome.output.find("end of the first step") == std::string::npos);
  CHECK(read_text(folder.file("run/ranks/rank_0.log")).find("to the end of the first step: ") != std::string::npos);
  const Json metrics = Json::parse(read_text(folder.file("run/metrics.json")));
  double sum = 0;
  for (const char* phase : {"program", "device", "ranks", "data", "plan", "arena", "model", "weights", "folder",
                            "checkpoint", "first step"})
    sum += metrics["start_phases"][phase].get<double>();
  CHECK(metrics["start_phases"].size() == 11);
  CHECK(std::abs(metrics["start_seconds"].get<double>() - sum) < 1e-9);
  constexpr double kTick = 0.02;  // the kernel counts a process's start in 10 ms ticks
  CHECK(sum <= all + kTick);
}
