// Range checks for the verbs' options, in CLI11's check() form. The ranges are Rules, as for config fields.
#pragma once
#include <CLI/CLI.hpp>
#include <cmath>
#include <string>

#include "engine/check.h"
#include "engine/fields.h"
#include "io/chat/chat_options.h"
#include "io/data/format/text_format.h"
#include "model/decoding/sampling.h"

namespace triad {

// Upper limits of --batch and --seq, the same as for train.micro_batch_size and train.seq_len.
inline constexpr double kMaxBatch = 1 << 20, kMaxSeqLen = 1 << 24;
// Upper limit for seeds and counts, 2^53 - 1: the check reads the number as a double, which holds every integer up to
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

// Checks that a path isn't "", as from a script's unset variable.
inline CLI::Validator named() {
  return {[](const std::string& text) { return text.empty() ? "a path is needed" : ""; }, ""};
}

// Adds --format, which overrides what the data's content and names say (io/data/format/text_format.h).
inline CLI::Option* add_format(CLI::App& verb, TextFormat& format) {
  return verb
      .add_option_function<std::string>(
          "--format",
          [&format](const std::string& text) {
            for (const auto& [word, value] : EnumWords<TextFormat>::words)
              if (text == word) return void(format = value);
            fail_usage("--format is {}: {} is allowed", text, all_words<TextFormat>());
          },
          "text: a file is one document; jsonl: each line is a record; auto: by content and name")
      ->type_name("TEXT")
      ->default_str("auto");
}

// Adds --learn, as data.learn.
inline CLI::Option* add_learn(CLI::App& verb, ChatLearn& learn) {
  return verb
      .add_option_function<std::string>(
          "--learn",
          [&learn](const std::string& text) {
            for (const auto& [word, value] : EnumWords<ChatLearn>::words)
              if (text == word) return void(learn = value);
            fail_usage("--learn is {}: {} is allowed", text, all_words<ChatLearn>());
          },
          "what is learned of conversations: assistant: all answers; last: the last answer; all: everything")
      ->type_name("TEXT")
      ->default_str("assistant");
}

// Adds the options that choose the next token. what: "text", which the same seed repeats.
inline void add_sampling(CLI::App& verb, SamplingOptions& sampling, uint64_t& seed, const std::string& what) {
  verb.add_option("--temperature", sampling.temperature, "divides the logits; 0: always the most likely token")
      ->check(within(at_least(0)))
      ->capture_default_str();
  verb.add_option("--top-k", sampling.top_k, "sample among the k most likely tokens; 0: all")
      ->check(within(at_least(0).up_to(kMaxInteger)))
      ->capture_default_str();
  verb.add_option("--top-p", sampling.top_p, "sample among the most likely tokens whose probabilities reach p")
      ->check(within(at_least(0).up_to(1)))
      ->capture_default_str();
  verb.add_option("--seed", seed, "seed of the random numbers: the same seed gives the same " + what)
      ->check(within(at_least(0).up_to(kMaxInteger)))
      ->capture_default_str();
}

// Adds --device and --dtype of a verb that decodes.
inline void add_device(CLI::App& verb, std::string& device, std::string& dtype) {
  verb.add_option("--device", device, "auto, cpu or cuda")->capture_default_str();
  verb.add_option("--dtype", dtype, "f64, f32 or bf16")->capture_default_str();
}

}  // namespace triad
