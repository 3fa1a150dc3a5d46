// Fuzzes decoding the frames that ranks exchange when they connect (engine/comm/handshake.h). Decoders refuse bytes by
// nullopt, not by an Error.
#include "engine/comm/handshake.h"

#include <algorithm>

#include "tests/fuzz/contract.h"

namespace triad::fuzz {

namespace {

template <class Value>
void check_same(const char* what, std::span<const std::byte> bytes, const std::optional<Value>& value) {
  if (value) expect(std::ranges::equal(encode(*value), bytes), "a {} is read that encode() does not write", what);
}

}  // namespace

void read_handshake(std::string_view text) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(text));
  const std::optional<Hello> hello = decode_hello(bytes);
  check_same("hello", bytes, hello);
  check_same("reply", bytes, decode_reply(bytes));
  if (!hello) return;
  for (size_t n = 0; n <= bytes.size(); ++n) expect(may_be_hello(bytes.first(n)), "no hello after {} bytes of one", n);
}

}  // namespace triad::fuzz
