// io/direct_writer: files whose large pieces go past the page cache.
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "engine/check.h"
#include "io/direct_writer.h"
#include "io/file.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using triad::test::check_error;
using triad::test::read_text;
using triad::test::TemporaryFolder;
namespace fs = std::filesystem;

namespace {

std::vector<std::byte> noise(size_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> all(bytes);
  std::generate(all.begin(), all.end(), [&] { return static_cast<std::byte>(random()); });
  return all;
}

}  // namespace

TEST_CASE("io: large and small pieces at any offset give the same file", "[io]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("large");
  const std::vector<std::byte> source = noise(size_t{21} << 20, 7);
  std::string expected;
  AtomicFile file(path);
  const auto write = [&](size_t offset, size_t from, size_t bytes) {
    const std::span<const std::byte> piece = std::span(source).subspan(from, bytes);
    if (expected.size() < offset + bytes) expected.resize(offset + bytes);
    std::transform(piece.begin(), piece.end(), expected.begin() + static_cast<std::ptrdiff_t>(offset),
                   [](std::byte b) { return static_cast<char>(b); });
    file.write_at(static_cast<int64_t>(offset), piece);
  };
  constexpr size_t kMiB = 1 << 20;
  write(1000, 0, 20 * kMiB);                      // several buffers, from an odd offset
  write(1000 + 20 * kMiB, 5, 4 * kMiB + 1);       // adjacent, so that two pieces share a block
  write(0, 99, 1000);                             // the block before, as a header is written last
  write(9 * kMiB, 3, 5000);                       // small, over bytes that may still be pending
  write(40 * kMiB, 1, 9 * kMiB);                  // leaves a hole before it
  write(41 * kMiB + 17, 2 * kMiB, 4 * kMiB + 3);  // large, over bytes that may still be pending
  CHECK(file.size() == static_cast<int64_t>(expected.size()));
  file.commit();
  const bool same = read_text(path) == expected;  // 50 MB each, which a failing CHECK would print
  CHECK(same);
  CHECK(triad::test::count_files(folder.path()) == 1);
}

TEST_CASE("io: a full disk under a large piece is an error that names the file, and leaves no file", "[io]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("large");
  const std::vector<std::byte> source = noise(size_t{12} << 20, 8);
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const rlimit limit{5'000'000, before.rlim_max};  // a limit on file sizes simulates a full disk
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  for (const int64_t offset : {0, 8, 4096})
    check_error(
        [&] {
          AtomicFile file(path);
          file.write_at(offset, source);
          file.write_at(offset + static_cast<int64_t>(source.size()), source);
          file.commit();
        },
        {path, "cannot write", "File too large"});
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  CHECK(triad::test::count_files(folder.path()) == 0);
}
