// CRC-32 as in gzip and zlib, at several GB/s where the processor multiplies polynomials (PCLMULQDQ), so that checksums
// do not limit the rate at which files are read and written. zlib 1.2 computes it bytewise from tables.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace triad {

// The CRC-32 when these bytes follow others, whose CRC-32 is `crc`.
uint32_t crc32_of(std::span<const std::byte> bytes, uint32_t crc = 0);
// What bytes with this CRC-32 contribute to a text's CRC-32 if `bytes_after` others follow them: a text's CRC-32 is the
// exclusive or of its parts' contributions.
uint32_t crc32_shifted(uint32_t crc, int64_t bytes_after);

}  // namespace triad
