// Range checks for the verbs' options, in the form of CLI11's check(). The ranges are Rules, as for config fields.
#pragma once
#include <CLI/CLI.hpp>
#include <cmath>
#include <string>

#include "engine/fields.h"

namespace triad {

// Upper limits of --batch and --seq, the same as those of train.micro_batch_size and train.seq_len.
inline constexpr double kMaxBatch = 1 << 20, kMaxSeqLen = 1 << 24;
// Upper limit of seeds and counts, 2^53 - 1: the check reads the number as a double, which holds every integer up to
// there.
inline constexpr double kMaxInteger = 9007199254740991;

// A check that accepts a finite number that obeys the rule.
inline CLI::Validator within(const Rule& rule) {
  return {[rule](const std::string& text) -> std::string {
            double value = 0;
            if (CLI::detail::lexical_cast(text, value) && std::isfinite(value) && rule.allows(value)) return "";
            return text + ": a number " + rule.str() + " is needed";
          },
          rule.str()};
}

// A check of a path that is not "": a script's variable that is not set.
inline CLI::Validator named() {
  return {[](const std::string& text) { return text.empty() ? "a path is needed" : ""; }, ""};
}

}  // namespace triad
