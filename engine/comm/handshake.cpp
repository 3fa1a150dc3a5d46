#include "engine/comm/handshake.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "engine/check.h"

namespace triad {

namespace {

constexpr std::string_view kHelloMagic = "triadhi\n", kReplyMagic = "triadre\n";
constexpr int kMostRanks = 1 << 20;

// Writer and Reader: write and read a frame's fields one after the other; integers are little-endian.
class Writer {
 public:
  explicit Writer(std::span<std::byte> to) : to_(to) {}
  void text(std::string_view bytes) { raw(std::as_bytes(std::span(bytes))); }
  void raw(std::span<const std::byte> bytes) {
    std::copy(bytes.begin(), bytes.end(), to_.begin());
    to_ = to_.subspan(bytes.size());
  }
  void number(uint32_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) to_[i] = static_cast<std::byte>(value >> (8 * i));
    to_ = to_.subspan(bytes);
  }

 private:
  std::span<std::byte> to_;
};
class Reader {
 public:
  explicit Reader(std::span<const std::byte> from) : from_(from) {}
  std::string text(size_t bytes) {
    const std::span<const std::byte> part = raw(bytes);
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }
  std::span<const std::byte> raw(size_t bytes) {
    const std::span<const std::byte> part = from_.first(bytes);
    from_ = from_.subspan(bytes);
    return part;
  }
  uint32_t number(size_t bytes) {
    uint32_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value |= static_cast<uint32_t>(from_[i]) << (8 * i);
    from_ = from_.subspan(bytes);
    return value;
  }

 private:
  std::span<const std::byte> from_;
};

// The HMAC over a label, both frames and the code. A rank's label differs from rank 0's, so neither end can send back
// the HMAC that it received.
Mac proof(std::string_view secret, std::string_view of, const Hello& hello, const Reply& prove, ReplyCode code) {
  if (secret.empty()) return {};
  std::vector<std::byte> message;
  const auto add = [&](std::span<const std::byte> bytes) { message.insert(message.end(), bytes.begin(), bytes.end()); };
  add(std::as_bytes(std::span(of)));
  add(encode(hello));
  add(encode(prove));
  message.push_back(static_cast<std::byte>(code));
  return hmac_sha256(secret, message);
}

}  // namespace

Nonce fresh_nonce() {
  Nonce nonce;
  TRIAD_CHECK(getentropy(nonce.data(), nonce.size()) == 0, "no random numbers from the kernel: {}",
              std::strerror(errno));
  return nonce;
}

const char* text_of(ReplyCode refusal) {
  switch (refusal) {
    case ReplyCode::other_run:
      return "it belongs to another run";
    case ReplyCode::needs_secret:
      return "it has no TRIAD_SECRET, but rank 0 has one";
    case ReplyCode::has_no_secret:
      return "it has a TRIAD_SECRET, but rank 0 has none";
    case ReplyCode::wrong_secret:
      return "its TRIAD_SECRET is not rank 0's";
    case ReplyCode::other_world:
      return "it counts other ranks than rank 0";
    case ReplyCode::taken:
      return "another process came first as this rank";
    default:
      return "it is refused";
  }
}

HelloFrame encode(const Hello& hello) {
  HelloFrame frame{};
  Writer to(frame);
  to.text(kHelloMagic);
  to.number(static_cast<uint32_t>(hello.port), 2);
  to.number(static_cast<uint32_t>(hello.rank), 4);
  to.number(static_cast<uint32_t>(hello.world), 4);
  to.number(hello.has_secret ? 1 : 0, 1);
  to.raw(hello.nonce);
  TRIAD_CHECK(hello.run_id.size() <= kMaxRunIdBytes, "a run id of {} bytes", hello.run_id.size());
  to.number(static_cast<uint32_t>(hello.run_id.size()), 1);
  to.text(hello.run_id);
  return frame;
}

std::optional<Hello> decode_hello(std::span<const std::byte> bytes) {
  if (bytes.size() != kHelloBytes) return std::nullopt;
  Reader from(bytes);
  if (from.text(kHelloMagic.size()) != kHelloMagic) return std::nullopt;
  const uint32_t port = from.number(2), rank = from.number(4), world = from.number(4), has_secret = from.number(1);
  if (port == 0 || world < 2 || world > kMostRanks || rank == 0 || rank >= world || has_secret > 1) return std::nullopt;
  Hello hello{.port = static_cast<int>(port),
              .rank = static_cast<int>(rank),
              .world = static_cast<int>(world),
              .has_secret = has_secret == 1};
  const std::span<const std::byte> nonce = from.raw(sizeof(Nonce));
  std::copy(nonce.begin(), nonce.end(), hello.nonce.begin());
  const size_t size = from.number(1);
  hello.run_id = from.text(size);
  const std::string rest = from.text(kMaxRunIdBytes - size);
  if (rest.find_first_not_of('\0') != std::string::npos) return std::nullopt;
  return hello;
}

bool may_be_hello(std::span<const std::byte> begin) {
  const size_t size = std::min(begin.size(), kHelloMagic.size());
  return std::memcmp(begin.data(), kHelloMagic.data(), size) == 0;
}

ReplyFrame encode(const Reply& reply) {
  ReplyFrame frame{};
  Writer to(frame);
  to.text(kReplyMagic);
  to.number(static_cast<uint32_t>(reply.code), 1);
  to.number(static_cast<uint32_t>(reply.world), 4);
  to.raw(reply.payload);
  return frame;
}

std::optional<Reply> decode_reply(std::span<const std::byte> bytes) {
  if (bytes.size() != kReplyBytes) return std::nullopt;
  Reader from(bytes);
  if (from.text(kReplyMagic.size()) != kReplyMagic) return std::nullopt;
  const uint32_t code = from.number(1), world = from.number(4);
  if (code > static_cast<uint32_t>(ReplyCode::taken) || world > kMostRanks) return std::nullopt;
  Reply reply{.code = static_cast<ReplyCode>(code), .world = static_cast<int>(world)};
  const std::span<const std::byte> payload = from.raw(sizeof(Nonce));
  std::copy(payload.begin(), payload.end(), reply.payload.begin());
  return reply;
}

Mac proof_of_rank(std::string_view secret, const Hello& hello, const Reply& prove) {
  return proof(secret, "triad: a rank", hello, prove, ReplyCode::prove);
}

Mac proof_of_rank_0(std::string_view secret, const Hello& hello, const Reply& prove, ReplyCode code) {
  return proof(secret, "triad: rank 0", hello, prove, code);
}

}  // namespace triad
