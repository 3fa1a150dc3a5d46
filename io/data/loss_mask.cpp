#include "io/data/loss_mask.h"

#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "engine/check.h"

namespace triad {

namespace {

static_assert(std::endian::native == std::endian::little, "masks are copied between words and bytes");

constexpr int64_t kBits = 64;  // bits per word

uint64_t low_bits(int64_t n) { return n == kBits ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

}  // namespace

// n: 0 to 64.
void LossMask::append_word(uint64_t bits, int64_t n) {
  if (n == 0) return;
  bits &= low_bits(n);
  const int64_t used = size_ % kBits;  // bits in the last word
  if (used == 0)
    words_.push_back(bits);
  else
    words_.back() |= bits << used;
  if (used > 0 && used + n > kBits) words_.push_back(bits >> (kBits - used));
  size_ += n;
}

void LossMask::append(bool learned, int64_t n) {
  for (; n > 0; n -= kBits) append_word(learned ? ~uint64_t{0} : 0, std::min(n, kBits));
}

void LossMask::append(std::span<const uint8_t> learned) {
  while (!learned.empty()) {
    const auto piece = learned.first(std::min(learned.size(), static_cast<size_t>(kBits)));
    uint64_t word = 0;
    for (size_t i = 0; i < piece.size(); ++i) word |= uint64_t{piece[i] != 0} << i;
    append_word(word, static_cast<int64_t>(piece.size()));
    learned = learned.subspan(piece.size());
  }
}

void LossMask::append_bits(std::span<const std::byte> bits, int64_t n) {
  TRIAD_CHECK(n <= static_cast<int64_t>(bits.size()) * 8, "a mask of {} bytes for {} tokens", bits.size(), n);
  for (; n > 0; n -= kBits) {
    uint64_t word = 0;
    const size_t bytes = std::min(bits.size(), sizeof word);
    std::memcpy(&word, bits.data(), bytes);
    append_word(word, std::min(n, kBits));
    bits = bits.subspan(bytes);
  }
}

void LossMask::append(const LossMask& other) {
  int64_t left = other.size_;
  for (const uint64_t word : other.words_) {
    append_word(word, std::min(left, kBits));
    left -= kBits;
  }
}

void LossMask::cut(int64_t size) {
  TRIAD_CHECK(size >= 0 && size <= size_, "a mask of {} tokens cannot be cut to {}", size_, size);
  size_ = size;
  words_.resize(static_cast<size_t>((size + kBits - 1) / kBits));
  if (size % kBits != 0) words_.back() &= low_bits(size % kBits);
}

int64_t LossMask::count(int64_t begin, int64_t end) const {
  TRIAD_CHECK(begin >= 0 && begin <= end && end <= size_, "tokens {} to {} of a mask of {}", begin, end, size_);
  if (begin == end) return 0;
  const auto first = static_cast<size_t>(begin / kBits), last = static_cast<size_t>((end - 1) / kBits);
  int64_t learned = 0;
  for (size_t i = first; i <= last; ++i) {
    uint64_t word = words_[i];
    if (i == first) word &= ~low_bits(begin % kBits);
    if (i == last) word &= low_bits((end - 1) % kBits + 1);
    learned += std::popcount(word);
  }
  return learned;
}

std::vector<std::byte> LossMask::bits() const {
  std::vector<std::byte> bytes(static_cast<size_t>((size_ + 7) / 8));
  if (size_ > 0) std::memcpy(bytes.data(), words_.data(), bytes.size());
  return bytes;
}

uint32_t LossMask::checksum() const {
  const auto* const bytes = reinterpret_cast<const Bytef*>(words_.data());
  return static_cast<uint32_t>(crc32_z(0, bytes, words_.size() * sizeof(uint64_t)));
}

}  // namespace triad
