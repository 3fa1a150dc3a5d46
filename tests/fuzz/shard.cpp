// Fuzzes reading token shards (io/data/shards.h). The same bytes are read as tokens.bin and as train.bin, because
// nanoGPT's shards, which have no header, are recognized by the latter name.
#include <algorithm>
#include <initializer_list>

#include "io/data/shards.h"
#include "tests/fuzz/contract.h"

namespace triad::fuzz {

namespace {

// `bits`: the file's bytes after the tokens.
void check_mask(const Shard& shard, std::string_view bits) {
  const LossMask mask = shard.mask();
  expect(mask.size() == shard.size(), "{}: a mask of {} for {} tokens", shard.path(), mask.size(), shard.size());
  int64_t learned = 0;
  for (int64_t i = 0; i < shard.size(); ++i) {
    const bool bit = !shard.has_mask() || (static_cast<uint8_t>(bits[static_cast<size_t>(i / 8)]) >> i % 8 & 1) != 0;
    expect(mask.learned(i) == bit, "{}: bit {} of its mask is {}", shard.path(), i, bit);
    learned += bit;
  }
  expect(mask.count(0, mask.size()) == learned, "{}: {} of its tokens are learned, not {}", shard.path(), learned,
         mask.count(0, mask.size()));
}

void check_shard(const std::string& path, std::string_view bytes) {
  const bool known = is_shard(path);
  const std::optional<Shard> shard = read_or_refuse(path, [&] { return Shard(path); });
  if (!shard) return;
  expect(known, "{}: a shard that is_shard() does not know", path);
  const int64_t n = shard->size(), width = static_cast<int64_t>(shard->width());
  const int64_t mask_bytes = shard->has_mask() ? (n + 7) / 8 : 0;
  const auto file_bytes = static_cast<int64_t>(bytes.size()), header = file_bytes - n * width - mask_bytes;
  expect(n > 0 && (header == 0 || header == 1024), "{}: {} tokens of {} bytes in {}", path, n, width, bytes.size());

  std::vector<int32_t> tokens(static_cast<size_t>(n));
  shard->read(0, tokens);
  int64_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t expected = 0;
    for (int64_t b = 0; b < width; ++b)
      expected |= static_cast<uint32_t>(static_cast<uint8_t>(bytes[static_cast<size_t>(header + i * width + b)]))
                  << (8 * b);
    expect(static_cast<uint32_t>(tokens[static_cast<size_t>(i)]) == expected, "{}: token {} is {}, not {}", path, i,
           tokens[static_cast<size_t>(i)], expected);
    most = std::max(most, static_cast<int64_t>(expected));
  }
  expect(shard->max_token() == most, "{}: the largest token is {}, not {}", path, most, shard->max_token());
  expect(accepts(path, [&] { shard->scan(most + 1); }), "{}: scan({}) finds a token", path, most + 1);
  expect(!accepts(path, [&] { shard->scan(most); }), "{}: scan({}) does not find token {}", path, most, most);

  check_mask(*shard, bytes.substr(bytes.size() - static_cast<size_t>(mask_bytes)));
  std::vector<int32_t> one(1);
  shard->read(n - 1, one);
  expect(one[0] == tokens.back(), "{}: the last token is {}, alone {}", path, tokens.back(), one[0]);
  for (const int64_t outside : {int64_t{-1}, n, INT64_MAX})
    expect(!accepts(path, [&] { shard->read(outside, one); }), "{}: token {} of {} is read", path, outside, n);

  if (most > INT32_MAX) return;  // ShardWriter takes int32 tokens, so such a shard cannot be written again
  const std::string copy = scratch_folder() + "/copy.bin";
  ShardWriter writer(copy, {.width = shard->width(), .masked = shard->has_mask(), .vocab = most + 1});
  std::vector<uint8_t> learned;
  const LossMask mask = shard->mask();
  for (int64_t i = 0; shard->has_mask() && i < n; ++i) learned.push_back(mask.learned(i) ? 1 : 0);
  writer.append(tokens, learned);
  writer.finish();
  const Shard again(copy);
  std::vector<int32_t> same(tokens.size());
  again.read(0, same);
  expect(again.size() == n && same == tokens, "{}: written and read again, its {} tokens are others", path, n);
  expect(again.has_mask() == shard->has_mask() && again.mask().bits() == shard->mask().bits(),
         "{}: written and read again, its mask is another", path);
}

}  // namespace

void read_shard(std::string_view bytes) {
  for (const char* name : {"tokens.bin", "train.bin"}) check_shard(scratch_file(name, bytes), bytes);
}

}  // namespace triad::fuzz
