#include "tests/support/checked_run.h"

#include "tests/support/program.h"
#include "tests/support/test.h"

namespace triad::test {

std::string run_ok(const std::string& args, const std::string& environment) {
  const Outcome outcome = run_program(args, environment);
  INFO(environment << " triad " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return outcome.output;
}

void refused(const std::string& args, int exit_code, const std::vector<std::string>& words,
             const std::string& environment) {
  const Outcome outcome = run_program(args, environment);
  INFO(environment << " triad " << args << "\n" << outcome.output);
  CHECK(outcome.exit_code == exit_code);
  for (const std::string& word : words) {
    INFO("expected: " << word);
    CHECK(has(outcome.output, word));
  }
}

}  // namespace triad::test
