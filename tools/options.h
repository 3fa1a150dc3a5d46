// Range checks of the verbs' options for CLI11's check(), by the Rules that config fields use.
#pragma once
#include <CLI/CLI.hpp>
#include <cmath>
#include <string>

#include "engine/fields.h"

namespace triad {

// The bounds of train.micro_batch_size and train.seq_len hold for --batch and --seq too.
inline constexpr double kMaxBatch = 1 << 20, kMaxSeqLen = 1 << 24;
// Limit of seeds and counts, 2^53 - 1: the check reads a double, which holds every integer up to there.
inline constexpr double kMaxInteger = 9007199254740991;

// Accepts a finite number that obeys the rule.
inline CLI::Validator within(const Rule& rule) {
  return {[rule](const std::string& text) -> std::string {
            double value = 0;
            if (CLI::detail::lexical_cast(text, value) && std::isfinite(value) && rule.allows(value)) return "";
            return text + ": a number " + rule.str() + " is needed";
          },
          rule.str()};
}

}  // namespace triad
