// HMAC-SHA256 by OpenSSL's libcrypto: hmac_openssl.cpp in a build with it, else hmac_none.cpp.
#pragma once
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace triad {

using Mac = std::array<std::byte, 32>;

std::string why_no_hmac();  // empty if this build has libcrypto
// A message's HMAC under a key. Throws UsageError in a build without libcrypto.
Mac hmac_sha256(std::string_view key, std::span<const std::byte> message);
// Whether two HMACs are equal, compared in constant time.
bool same_mac(const Mac&, const Mac&);

}  // namespace triad
