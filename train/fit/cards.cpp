#include "train/fit/cards.h"

#include <fmt/ranges.h>

#include <vector>

#include "engine/check.h"
#include "model/flops.h"

namespace triad {

namespace {

constexpr double kTera = 1e12, kGiga = 1e9;

// Of their data sheets' 989.5 TFLOP/s and 3.35 and 4.8 TB/s, H100 and H200 reach these shares in steps, which their
// power limit sets (tests/baselines/findings/step.md).
constexpr double kProductShare = 0.70, kMemoryShare = 0.89;

// host: bytes/s in one rank's collectives within a host. H100 and H200 have NVLink of the same rate.
CardRates links_of(double host) {
  CardRates links = kH200Rates;
  links.host = host;
  return links;
}

Card measured_card(const char* word, const char* name, int64_t memory_bytes, double memory) {
  const double products = kProductShare * peak_bf16_flops(name);
  return {.word = word,
          .name = name,
          .memory_bytes = memory_bytes,
          .num_sms = 132,
          .compute_capability = 90,
          .watts = 700,
          .measured = true,
          .products = products,
          .memory = memory,
          .links = kH200Rates};
}

// bytes_per_s, links: by data sheet. Collectives reach 0.44 of NVLink's rate, as on an H200.
struct DataSheet {
  int64_t memory_bytes;
  int num_sms, compute_capability;
  double watts, bytes_per_s, links;
};
Card unmeasured_card(const char* word, const char* name, const DataSheet& sheet) {
  constexpr double kLinkShare = 200.0 / 450;
  const double products = kProductShare * peak_bf16_flops(name), memory = kMemoryShare * sheet.bytes_per_s;
  return {.word = word,
          .name = name,
          .memory_bytes = sheet.memory_bytes,
          .num_sms = sheet.num_sms,
          .compute_capability = sheet.compute_capability,
          .watts = sheet.watts,
          .measured = false,
          .products = products,
          .memory = memory,
          .links = links_of(kLinkShare * sheet.links)};
}

// Memory: what CUDA reports, in steps of 0.1 GB.
const std::vector<Card>& all_cards() {
  static const std::vector<Card> kAll = {
      measured_card("h100", "H100", 84'900'000'000, 3.0 * kTera),
      measured_card("h200", "H200", 150'100'000'000, 4.22 * kTera),
      unmeasured_card("a100", "A100", {85'000'000'000, 108, 80, 400, 2.039 * kTera, 300 * kGiga}),
      unmeasured_card("4090", "RTX 4090", {25'300'000'000, 128, 89, 450, 1.008 * kTera, 32 * kGiga}),
      unmeasured_card("b200", "B200", {191'500'000'000, 148, 100, 1000, 8.0 * kTera, 900 * kGiga})};
  return kAll;
}

}  // namespace

std::string card_words() {
  std::vector<std::string> words;
  for (const Card& card : all_cards()) words.emplace_back(card.word);
  return fmt::format("{}", fmt::join(words, ", "));
}

const Card& card_of(std::string_view word) {
  for (const Card& card : all_cards())
    if (word == card.word) return card;
  fail_usage("--card {}: there are {}", word, card_words());
}

std::optional<Card> card_named(std::string_view device_name) {
  for (const Card& card : all_cards())
    if (device_name.find(card.name) != std::string_view::npos) return card;
  return std::nullopt;
}

}  // namespace triad
