// The handshake between rank 0 and a rank that connects to it: frames as bytes, and proofs that both ends have the same
// TRIAD_SECRET. Every frame has a fixed size; a peer cannot choose how many bytes are read.
//
//   rank -> rank 0   Hello: which run, which rank, and a nonce
//   rank 0 -> rank   Reply: ReplyCode::prove and a nonce, or a refusal
//   rank -> rank 0   Proof: an HMAC over both frames
//   rank 0 -> rank   Reply: ReplyCode::welcome or a refusal, with rank 0's HMAC over all three
//   rank 0 -> rank   Reply: ReplyCode::begin, once all ranks have connected
//
// Fresh nonces from both ends make replayed handshakes fail. Without a secret the HMACs are zeros.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "engine/comm/hmac.h"
#include "engine/comm/launch_env.h"

namespace triad {

using Nonce = std::array<std::byte, 32>;
Nonce fresh_nonce();  // drawn from the operating system's random generator

struct Hello {
  int port = 0;  // this rank's MASTER_PORT; rank 0 refuses a different one as another run's
  int rank = 0, world = 0;
  bool has_secret = false;
  std::string run_id{};
  Nonce nonce{};
};
inline constexpr size_t kHelloBytes = 8 + 2 + 4 + 4 + 1 + sizeof(Nonce) + 1 + kMaxRunIdBytes;
using HelloFrame = std::array<std::byte, kHelloBytes>;

enum class ReplyCode : uint8_t {
  prove,
  welcome,
  begin,
  other_run,  // this and the following are refusals: see text_of()
  needs_secret,
  has_no_secret,
  wrong_secret,
  other_world,
  taken,
};
// Why rank 0 refuses a rank, as text for both ends' messages: "it belongs to another run".
const char* text_of(ReplyCode refusal);

struct Reply {
  ReplyCode code = ReplyCode::prove;
  int world = 0;    // rank 0's world size
  Nonce payload{};  // rank 0's nonce in the first reply (prove), its HMAC in replies to a proof
};
inline constexpr size_t kReplyBytes = 8 + 1 + 4 + sizeof(Nonce);
using ReplyFrame = std::array<std::byte, kReplyBytes>;

HelloFrame encode(const Hello&);
ReplyFrame encode(const Reply&);
// Decode the bytes that encode() writes; empty for any other bytes.
std::optional<Hello> decode_hello(std::span<const std::byte> bytes);
std::optional<Reply> decode_reply(std::span<const std::byte> bytes);
// Whether a Hello can begin with these bytes.
bool may_be_hello(std::span<const std::byte> begin);

// A rank's HMAC and rank 0's; zeros if the secret is empty.
Mac proof_of_rank(std::string_view secret, const Hello&, const Reply& prove);
Mac proof_of_rank_0(std::string_view secret, const Hello&, const Reply& prove, ReplyCode code);

}  // namespace triad
