// main() of the tests, for Catch2 2 and 3: registers the tests of the tables of ops, then runs Catch2.
#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#endif
#include "tests/support/test.h"

int main(int argc, char** argv) {
  triad::test::register_op_tests();
  return Catch::Session().run(argc, argv);
}
