// NVTX: the ranges that a profiler receives during training steps.
#include <map>
#include <sstream>

#include "engine/nvtx.h"
#include "engine/with_cuda.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

TEST_CASE("nvtx: a profiler receives one named range for each op, in order", "[train]") {
  if (!backend::built_with_cuda()) return void(skip("built without CUDA"));
  const TemporaryFolder folder;
  const Outcome outcome = run_program("train " TRIAD_SOURCE_DIR
                                      "/configs/tiny.json --set runtime.device=cpu "
                                      "--set train.steps=3 --set log.out_dir=" +
                                          folder.file("run"),
                                      "NVTX_INJECTION64_PATH=" TRIAD_FAULTS " TRIAD_RANGES=" + folder.file("ranges"));
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  std::istringstream in(read_text(folder.file("ranges")));
  std::map<std::string, int> counts;
  bool open = false;
  for (std::string line; std::getline(in, line); open = !open) {
    INFO(line);
    // Ranges do not nest: matrix products that the classifier calls open no range.
    REQUIRE((line == "end") == open);
    if (!open) ++counts[line];
  }
  CHECK_FALSE(open);
  // Expected counts for three steps and two layers.
  for (const char* op :
       {"nsa_attend_selected_forward", "nsa_attend_window_backward", "nsa_select", "nsa_gate_backward"})
    CHECK(counts[op] == 6);
  CHECK(counts["classifier_forward_backward"] == 3);
  CHECK(counts["adamw"] >= 3);
  CHECK(counts["matmul"] > 6);
}
