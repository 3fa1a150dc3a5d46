// How a test program ends if its tests are skipped, fail, or both. The hidden tests are run by the one after them.
#include <filesystem>

#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad::test;

TEST_CASE("skip example: skipped", "[.skip]") { skip("an example"); }
TEST_CASE("skip example: passed", "[.skip]") { CHECK(true); }
TEST_CASE("skip example: failed", "[.skip]") { CHECK(false); }
TEST_CASE("skip example: four checks failed", "[.skip]") {
  for (int i = 0; i < kSkippedCode; ++i) CHECK(false);
}
TEST_CASE("skip example: failed and skipped", "[.skip]") {
  CHECK(false);
  skip("an example");
}
TEST_CASE("skip example: checked and skipped", "[.skip]") {
  CHECK(true);
  skip("an example");
}

TEST_CASE("skip: a test program ends with 4 if all its tests were skipped, and with 1 if one failed", "[skip]") {
  struct Case {
    const char* tests;
    int exit_code;
  };
  for (const auto& [tests, exit_code] : {Case{"skipped", kSkippedCode},
                                         {"passed", 0},
                                         {"failed", 1},
                                         {"four checks failed", 1},
                                         {"failed and skipped", 1},
                                         {"checked and skipped", 1},
                                         {"passed','skip example: skipped", 0},
                                         {"failed','skip example: skipped", 1}}) {
    const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
    const Outcome outcome = run_command("'" + program + "' 'skip example: " + tests + "'");
    INFO(tests << "\n" << outcome.output);
    CHECK(outcome.exit_code == exit_code);
    CHECK(has(outcome.standard_output, "SKIPPED: an example") == has(tests, "skipped"));
  }
}
