#include "engine/check.h"
#include "engine/comm/hmac.h"

namespace triad {

std::string why_no_hmac() { return "this build has no OpenSSL: install libssl-dev and configure again"; }

Mac hmac_sha256(std::string_view, std::span<const std::byte>) { fail_usage("no HMAC: {}", why_no_hmac()); }

bool same_mac(const Mac&, const Mac&) { return false; }

}  // namespace triad
