// Every test includes this header: Catch2 (version 2 or 3), and functions that skip a test on machines that lack
// something.
#pragma once
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
#include <cstdio>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/check.h"
#include "engine/context.h"
#include "tests/support/skip.h"

// Makes Approx visible both globally and in Catch: Catch2 2 declares it globally, Catch2 3 in Catch.
#if __has_include(<catch2/catch_all.hpp>)
using Catch::Approx;
#else
namespace Catch {
using Detail::Approx;
}
#endif

namespace triad::test {

// Checks that f throws an Error whose message contains each word.
template <class F>
void check_error(F&& f, const std::vector<std::string>& words) {
  std::string message = "(nothing was thrown)";
  try {
    f();
  } catch (const Error& e) { message = e.what(); }
  INFO(message);
  CHECK(message != "(nothing was thrown)");
  for (const std::string& word : words) {
    INFO("expected: " << word);
    CHECK(message.find(word) != std::string::npos);
  }
}

// Registers the OpCase tables' tests with Catch2, at run time, because their names come from the tables.
void register_op_tests();

}  // namespace triad::test
