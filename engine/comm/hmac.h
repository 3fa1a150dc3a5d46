// HMAC-SHA256 by OpenSSL's libcrypto, where the build found it: hmac_openssl.cpp or hmac_none.cpp.
#pragma once
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace triad {

using Mac = std::array<std::byte, 32>;

std::string why_no_hmac();  // empty: this build has it
// Throws UsageError where this build has none.
Mac hmac_sha256(std::string_view key, std::span<const std::byte> message);
// Takes the same time whatever the bytes are.
bool same_mac(const Mac&, const Mac&);

}  // namespace triad
