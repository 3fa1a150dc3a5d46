// Checks of the verbs' options, for CLI11's check(): a number obeys a Rule, as a config's fields do.
#pragma once
#include <CLI/CLI.hpp>
#include <cmath>
#include <string>

#include "engine/fields.h"

namespace triad {

// The bounds of train.micro_batch_size and train.seq_len hold for --batch and --seq too.
inline constexpr double kMaxBatch = 1 << 20, kMaxSeqLen = 1 << 24;
// Seeds and counts: below 2^53 a double, which the check reads, is every integer.
inline constexpr double kMaxInteger = 9007199254740991;

// Neither NaN nor an infinity is a number.
inline CLI::Validator within(const Rule& rule) {
  return {[rule](const std::string& text) -> std::string {
            double value = 0;
            if (CLI::detail::lexical_cast(text, value) && std::isfinite(value) && rule.allows(value)) return "";
            return text + ": a number " + rule.str() + " is needed";
          },
          rule.str()};
}

}  // namespace triad
