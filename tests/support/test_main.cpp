// The tests' main(), for Catch2 2 and 3: registers the op tables' tests, then runs Catch2. The exit code is 0 if all
// tests passed, kSkippedCode (skip.h) if all were skipped, and 1 if one failed. (Catch2's own code counts failed
// checks, which may be any number.)
#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#endif
#include "kernels/common/blas_core.h"
#include "tests/support/test.h"

namespace {

#if __has_include(<catch2/catch_session.hpp>)
using Listener = Catch::EventListenerBase;
#else
using Listener = Catch::TestEventListenerBase;
#endif

int tests_run = 0, tests_skipped = 0, tests_half_skipped = 0;

// Counts tests, and fails those that skip and check: what a test leaves out must show.
class SkipCounter : public Listener {
 public:
  using Listener::Listener;
  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    Listener::testCaseStarting(info);
    skips_before_ = triad::test::skips();
  }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    Listener::testCaseEnded(stats);
    ++tests_run;
    if (triad::test::skips() == skips_before_) return;
    ++tests_skipped;
    const auto checks = static_cast<long>(stats.totals.assertions.total());
    if (checks == 0) return;
    ++tests_half_skipped;
    std::printf("a test that is skipped has %ld checks: a test of its own for what is skipped\n", checks);
  }

 private:
  int skips_before_ = 0;
};

}  // namespace

CATCH_REGISTER_LISTENER(SkipCounter)

int main(int argc, char** argv) {
  triad::use_better_blas_core(argv);  // the program does the same, and some tests compare its bits with theirs
  triad::test::register_op_tests();
  if (Catch::Session().run(argc, argv) != 0 || tests_half_skipped > 0) return 1;
  return tests_run > 0 && tests_skipped == tests_run ? triad::test::kSkippedCode : 0;
}
