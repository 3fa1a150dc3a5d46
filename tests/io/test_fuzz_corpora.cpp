// Runs the fuzzers' entry functions on their corpora (tests/fuzz: seeds, and inputs that once failed), without clang.
#include <ctime>
#include <filesystem>

#include "tests/fuzz/contract.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad::test;
namespace fs = std::filesystem;
namespace fuzz = triad::fuzz;

TEST_CASE("fuzz: each reader keeps its contract on every input of its corpus", "[fuzz]") {
  for (const fuzz::Reader& reader : fuzz::kReaders) {
    const fs::path corpus = fs::path(TRIAD_SOURCE_DIR) / "tests/fuzz/corpora" / reader.name;
    size_t inputs = 0;
    for (const auto& entry : fs::directory_iterator(corpus)) {
      ++inputs;
      const std::string bytes = read_text(entry.path().string());
      INFO(entry.path().string() << ", " << bytes.size() << " bytes");
      CHECK_NOTHROW(fuzz::run(reader, bytes));
      // Truncated inputs are inputs, too.
      for (const size_t eighth : {1, 4, 7})
        CHECK_NOTHROW(fuzz::run(reader, bytes.substr(0, bytes.size() * eighth / 8)));
    }
    INFO(corpus.string());
    CHECK(inputs >= 5);
  }
}

TEST_CASE("fuzz: a violation of the contract is reported", "[fuzz]") {
  const auto broken = [](auto&& f) {
    try {
      f();
    } catch (const fuzz::Broken&) { return true; }
    return false;
  };
  CHECK(!broken([] { fuzz::check_refusal("a.bin: no token shard", "a.bin"); }));
  CHECK(broken([] { fuzz::check_refusal("no token shard", "a.bin"); }));
  CHECK(broken([] { fuzz::check_refusal("", ""); }));
  CHECK(broken([] { fuzz::check_refusal("a.bin: \xff", "a.bin"); }));
  CHECK(broken([] { fuzz::check_refusal("a.bin: \x1b[2J", "a.bin"); }));
  CHECK(broken([] { fuzz::check_refusal("a.bin: " + std::string(5000, 'x'), "a.bin"); }));
  const auto spin = [](std::string_view) {
    volatile uint64_t n = 0;
    for (const std::clock_t end = std::clock() + CLOCKS_PER_SEC * 11 / 10; std::clock() < end;) n = n + 1;
  };
  CHECK(broken([&] { fuzz::run({"spin", spin}, ""); }));
  CHECK(fuzz::sections("a\n%%\nb", 3) == std::vector<std::string_view>{"a", "b", ""});
}
