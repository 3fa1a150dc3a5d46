// Cards for which `triad plan --card` plans, and what they reach in training steps.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "engine/context.h"
#include "train/fit/step_cost.h"

namespace triad {

struct Card {
  const char* word;      // what --card takes
  const char* name;      // part of the name by which CUDA knows the card
  int64_t memory_bytes;  // the whole memory, as CUDA reports it
  int num_sms, compute_capability;
  double watts;  // power limit
  // Measured in steps on the card, or its data sheet's figures times the share that H100 and H200 reach.
  bool measured;
  double products, memory;  // FLOP/s of bf16 products; bytes/s of kernels that only read and write memory
  CardRates links;          // rates for what ranks send each other
};
// What a run leaves of a card's memory to the CUDA context, kernel code and NCCL.
inline constexpr int64_t kCardReserve = 1'500'000'000;

// The card of this word; throws UsageError, with all words, if there is none.
const Card& card_of(std::string_view word);
std::string card_words();  // "h100, h200, ..."
// The card with this name; nullopt if no estimate knows it.
std::optional<Card> card_named(std::string_view device_name);

// The device of a plan: one of this machine, or a card that need not be here.
struct PlannedDevice : Device {
  int num_sms = 0, compute_capability = 0;  // 0: as Runtime finds them
  PlannedDevice(Device device) : Device(device) {}
  explicit PlannedDevice(const Card& card)
      : Device(Device::cuda()), num_sms(card.num_sms), compute_capability(card.compute_capability) {}
  // Makes a planning context choose kernels as on this card.
  void describe(Context& ctx) const {
    if (num_sms > 0) ctx.num_sms = num_sms, ctx.compute_capability = compute_capability;
  }
};

}  // namespace triad
