// Numbers with their nouns, for what the program prints: "1 step", "3 steps".
#pragma once
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace triad {

// The noun alone, with an s unless n is 1.
inline std::string plural(int64_t n, std::string_view noun) { return fmt::format("{}{}", noun, n == 1 ? "" : "s"); }

// The number and the noun: "1 step", "1000 steps".
inline std::string counted(int64_t n, std::string_view noun) { return fmt::format("{} {}", n, plural(n, noun)); }

}  // namespace triad
