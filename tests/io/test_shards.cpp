// Token shards that other programs wrote, and shards larger than 2^31 bytes and tokens.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "io/data/dataset.h"
#include "io/data/shards.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using triad::test::check_error;
using triad::test::TemporaryFolder;
using triad::test::write_text;

namespace {

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::vector<int32_t> all_of(const Shard& shard) {
  std::vector<int32_t> tokens(static_cast<size_t>(shard.size()));
  shard.read(0, tokens);
  return tokens;
}

// Returns a shard in llmq's format: BIN.TOK and a line feed, then version, bytes per token, tokens, vocabulary and mask
// as i32, padded to 1,024 bytes.
std::string llmq(int32_t version, int32_t bytes, int32_t count, int32_t mask, const std::string& body) {
  std::string header = "BIN.TOK\n" + bytes_of<int32_t>({version, bytes, count, 50257, mask});
  header.resize(1024, '*');
  return header + body;
}

// A sparse file with the given size: it reads as zero where nothing is written, and takes almost no disk space.
class SparseFile {
 public:
  SparseFile(const std::string& path, int64_t bytes) : fd_(::open(path.c_str(), O_WRONLY | O_CREAT, 0600)) {
    REQUIRE(fd_ >= 0);
    REQUIRE(::ftruncate(fd_, bytes) == 0);
  }
  ~SparseFile() { ::close(fd_); }
  template <class T>
  void write(int64_t offset, T value) {
    REQUIRE(::pwrite(fd_, &value, sizeof value, offset) == static_cast<ssize_t>(sizeof value));
  }

 private:
  int fd_;
};

}  // namespace

TEST_CASE("shards: those of llmq and nanoGPT are read", "[io]") {
  const TemporaryFolder folder;
  const std::vector<int32_t> tokens = {7, 50256, 0, 128'000};
  write_text(folder.file("a.bin"), llmq(2, 4, 4, 0, bytes_of(tokens)));
  const Shard shard(folder.file("a.bin"));
  CHECK(is_shard(folder.file("a.bin")));
  CHECK(std::string(shard.format()).find("BIN.TOK") != std::string::npos);
  CHECK(shard.width() == TokenWidth::u32);
  CHECK(all_of(shard) == tokens);
  check_error([&] { shard.scan(128'000); }, {"token 128000", "offset 1036"});
  const auto bad = [&](const std::string& bytes, const std::vector<std::string>& words) {
    write_text(folder.file("b.bin"), bytes);
    check_error([&] { Shard s(folder.file("b.bin")); }, words);
  };
  const std::string body = bytes_of(tokens);
  bad(llmq(3, 4, 4, 0, body), {"b.bin", "offset 8", "version 2", "found 3"});
  bad(llmq(2, 2, 4, 0, body), {"offset 12", "4 bytes", "found 2"});
  bad(llmq(2, 4, 0, 0, body), {"offset 16", "found 0"});
  bad(llmq(2, 4, 4, 2, body + "x"), {"b.bin", "offset 24", "mask", "found 2"});
  bad(llmq(2, 4, 4, 1, body), {"b.bin", "truncated", "mask, which begins at offset 1040", "1041", "offset 1040"});
  bad(llmq(2, 4, 4, 1, body + "\x0f\x01"), {"b.bin", "behind the mask", "1041", "offset 1042"});
  bad(llmq(2, 4, 4, 1, body + "\x15"), {"b.bin", "offset 1040", "mask of 4 tokens", "upper 4 bits", "byte 21"});
  write_text(folder.file("masked.bin"), llmq(2, 4, 4, 1, body + "\x05"));
  const Shard masked(folder.file("masked.bin"));
  CHECK(all_of(masked) == tokens);
  CHECK(std::string(masked.format()).find("mask") != std::string::npos);
  CHECK(masked.has_mask());
  CHECK(!shard.has_mask());
  CHECK(masked.mask().bits() == std::vector<std::byte>{std::byte{5}});
  CHECK(shard.mask().count(0, 4) == 4);
  bad(llmq(2, 4, 5, 0, body), {"truncated", "1044", "offset 1040"});
  bad(llmq(2, 4, 3, 0, body), {"behind", "1036", "offset 1040"});
  bad(llmq(2, 4, 4, 0, body).substr(0, 900), {"truncated", "1024", "offset 900"});

  const std::vector<uint16_t> raw = {50256, 1, 2, 40'000, 5};
  for (const char* name : {"train.bin", "val.bin"}) {
    write_text(folder.file(name), bytes_of(raw));
    CHECK(is_shard(folder.file(name)));
    const Shard nanogpt(folder.file(name));
    CHECK(nanogpt.width() == TokenWidth::u16);
    CHECK(all_of(nanogpt) == std::vector<int32_t>{50256, 1, 2, 40'000, 5});
    check_error([&] { nanogpt.scan(50256); }, {name, "token 50256", "offset 0"});
  }
  write_text(folder.file("train.bin"), bytes_of(raw) + "\1");
  check_error([&] { Shard s(folder.file("train.bin")); }, {"train.bin", "behind", "10 bytes", "offset 11"});
  write_text(folder.file("train.bin"), "This is text, whatever its name says.\n");
  CHECK(!is_shard(folder.file("train.bin")));
  check_error([&] { Shard s(folder.file("train.bin")); }, {"train.bin", "magic"});
  write_text(folder.file("train.bin"), bytes_of(std::vector<int32_t>(100, 7)));  // u32 tokens without a header
  CHECK(!is_shard(folder.file("train.bin")));
  write_text(folder.file("fine_train.bin"), bytes_of(raw));
  CHECK(!is_shard(folder.file("fine_train.bin")));
  write_text(folder.file("other.bin"), bytes_of(raw));
  check_error([&] { Shard s(folder.file("other.bin")); }, {"other.bin", "nanoGPT", "train.bin"});
}

TEST_CASE("shards: more than 2^31 bytes, and more than 2^31 tokens", "[io]") {
  const TemporaryFolder folder;
  constexpr int64_t kMany = (int64_t{1} << 31) + 1000;
  {
    SparseFile file(folder.file("train.bin"), kMany * 2);  // nanoGPT's format has no count that could overflow
    for (int64_t at = 0; at < 4096; at += 2) file.write<uint16_t>(at, 1);
    file.write<uint16_t>((kMany - 1) * 2, 258);
    SparseFile llmc(folder.file("b.bin"), 1024 + 4 * int64_t{700'000'000});
    llmc.write<int32_t>(0, 20240801);
    llmc.write<int32_t>(4, 7);
    llmc.write<int32_t>(8, 700'000'000);
    llmc.write<int32_t>(1024 + 4 * int64_t{699'999'999}, 259);
  }
  const auto source =
      shard_data({.paths = {folder.file("train.bin"), folder.file("b.bin")}, .val_paths = {}}, 260).train;
  CHECK(source->size() == kMany + 700'000'000);
  std::vector<int32_t> tokens(3);
  source->read(kMany - 2, tokens);
  CHECK(tokens == std::vector<int32_t>{0, 258, 0});
  source->read(source->size() - 3, tokens);
  CHECK(tokens == std::vector<int32_t>{0, 0, 259});
  check_error([&] { Shard(folder.file("train.bin")).scan(258); },
              {"token 258", "offset 4294969294", "token number 2147484647"});
  check_error([&] { Shard(folder.file("b.bin")).scan(259); }, {"token 259", "offset 2800001020"});
}
