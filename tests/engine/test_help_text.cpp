// The lines of --help: wrapped for a terminal, or about a topic.
#include "engine/process/help_text.h"

#include "engine/check.h"
#include "tests/support/test.h"

using namespace triad;

TEST_CASE("help text: lines fit the terminal, and a topic leaves its own", "[engine]") {
  const std::string help =
      "Usage: triad x [OPTIONS]\n\nOptions:\n  --set TEXT     group.key=value: overrides the file\n"
      "  --a-very-long-name INT:in [1, 5]\n                 samples\n"
      "  nsa.w          window; in [1, 9]\n";
  CHECK(wrapped(help, 80) == help);
  CHECK(wrapped("  --set TEXT     group.key=value: overrides the file\n", 40) ==
        "  --set TEXT     group.key=value:\n                 overrides the file\n");
  CHECK(wrapped("one two three", 7) == "one two\n  three\n");
  CHECK(wrapped("unbreakable", 4) == "unbreakable\n");
  CHECK(wrapped("unbreakable word", 4) == "unbreakable\n  word\n");
  CHECK(help_about(help, "nsa") == "  nsa.w          window; in [1, 9]\n");
  CHECK(help_about(help, "long") == "  --a-very-long-name INT:in [1, 5]\n                 samples\n");
  CHECK_THROWS_AS(help_about(help, "Usage"), UsageError);
}
