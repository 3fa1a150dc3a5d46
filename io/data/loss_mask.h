// Which tokens count in the loss: a bit for each token, 1 if the model learns to predict that token.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace triad {

class LossMask {
 public:
  int64_t size() const { return size_; }
  void append(bool learned, int64_t n);
  // A byte for each token: 0, or 1 if the token is learned.
  void append(std::span<const uint8_t> learned);
  // The first n bits in `bits`, the lowest bit of each byte first.
  void append_bits(std::span<const std::byte> bits, int64_t n);
  void append(const LossMask&);
  void cut(int64_t size);  // drops the bits from `size` on

  bool learned(int64_t token) const { return (words_[static_cast<size_t>(token / 64)] >> (token % 64) & 1) != 0; }
  int64_t count(int64_t begin, int64_t end) const;  // learned tokens in [begin, end)
  // All bits, the lowest bit of each byte first; the bits after the last token are 0.
  std::vector<std::byte> bits() const;
  uint32_t checksum() const;  // CRC-32 of the bits

 private:
  void append_word(uint64_t bits, int64_t n);

  std::vector<uint64_t> words_;  // the bits after the last token are 0
  int64_t size_ = 0;
};

// The mask for a source's tokens, which may be part of a longer mask. Without a mask, every token is learned.
struct MaskView {
  const LossMask* mask = nullptr;
  int64_t first = 0;  // bit for the source's first token

  bool empty() const { return mask == nullptr; }
  bool learned(int64_t token) const { return empty() || mask->learned(first + token); }
  int64_t count(int64_t begin, int64_t end) const {
    return empty() ? end - begin : mask->count(first + begin, first + end);
  }
};

}  // namespace triad
