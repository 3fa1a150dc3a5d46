// The handshake between rank 0 and a rank that connects to it: its frames as bytes, and the proofs that both ends know
// TRIAD_SECRET. Every frame has a fixed size, so that no peer can announce a larger one.
//
//   rank -> rank 0   Hello: which run, which rank, and a nonce
//   rank 0 -> rank   Reply: Verdict::prove and a nonce, or a refusal
//   rank -> rank 0   Proof: an HMAC over both frames
//   rank 0 -> rank   Reply: Verdict::welcome or a refusal, with rank 0's HMAC over all three
//   rank 0 -> rank   Reply: Verdict::begin, when all ranks are there
//
// Fresh nonces from both ends make a replayed handshake fail. Without a secret the HMACs are zeros.
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
Nonce fresh_nonce();  // from the kernel's generator

struct Hello {
  int port = 0;  // MASTER_PORT as the rank has it, which keeps runs apart too
  int rank = 0, world = 0;
  bool has_secret = false;
  std::string run_id{};
  Nonce nonce{};
};
inline constexpr size_t kHelloBytes = 8 + 2 + 4 + 4 + 1 + sizeof(Nonce) + 1 + kMaxRunIdBytes;
using HelloFrame = std::array<std::byte, kHelloBytes>;

enum class Verdict : uint8_t {
  prove,
  welcome,
  begin,
  other_run,  // refusals: see text_of()
  needs_secret,
  has_no_secret,
  wrong_secret,
  other_world,
  taken,
};
// Why rank 0 refuses a rank, as both ends' messages say it: "it belongs to another run".
const char* text_of(Verdict refusal);

struct Reply {
  Verdict verdict = Verdict::prove;
  int world = 0;    // rank 0's
  Nonce payload{};  // a nonce behind prove, an HMAC behind what follows a proof
};
inline constexpr size_t kReplyBytes = 8 + 1 + 4 + sizeof(Nonce);
using ReplyFrame = std::array<std::byte, kReplyBytes>;

HelloFrame encode(const Hello&);
ReplyFrame encode(const Reply&);
// Nothing if the bytes are none that encode() writes.
std::optional<Hello> decode_hello(std::span<const std::byte> bytes);
std::optional<Reply> decode_reply(std::span<const std::byte> bytes);
// Whether a Hello may begin with these bytes.
bool may_be_hello(std::span<const std::byte> begin);

// The proofs: of a rank, and of rank 0. Zeros where the secret is empty.
Mac proof_of_rank(std::string_view secret, const Hello&, const Reply& prove);
Mac proof_of_rank_0(std::string_view secret, const Hello&, const Reply& prove, Verdict verdict);

}  // namespace triad
