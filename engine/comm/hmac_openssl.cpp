#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "engine/check.h"
#include "engine/comm/hmac.h"

namespace triad {

std::string why_no_hmac() { return ""; }

Mac hmac_sha256(std::string_view key, std::span<const std::byte> message) {
  Mac mac{};
  unsigned int size = 0;
  const unsigned char* const done = HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                                         reinterpret_cast<const unsigned char*>(message.data()), message.size(),
                                         reinterpret_cast<unsigned char*>(mac.data()), &size);
  TRIAD_CHECK(done != nullptr && size == mac.size(), "OpenSSL computes no HMAC-SHA256 ({} bytes came)", size);
  return mac;
}

bool same_mac(const Mac& a, const Mac& b) { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

}  // namespace triad
