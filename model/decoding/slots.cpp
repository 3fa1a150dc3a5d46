#include "model/decoding/slots.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/backend.h"
#include "engine/check.h"
#include "engine/process/counted.h"

namespace triad {

Slots::Slots(DecodeSession& session, int64_t context, std::string model, int64_t together)
    : session_(session),
      context_(context),
      together_(together),
      model_(std::move(model)),
      slots_(static_cast<size_t>(session.batch())) {
  constexpr int64_t kMostTogether = 8;  // texts of 1,000 tokens in a pass (model/decoding/decode_session.cpp)
  if (together_ == 0 && session.ctx().device.is_cuda()) together_ = std::min(kMostTogether, session.batch() / 8);
}

bool Slots::has_room() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& s) { return s.text == nullptr; });
}

bool Slots::empty() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const Slot& s) { return s.text == nullptr; });
}

void Slots::add(Continuation& text) {
  const auto free = std::find_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.text == nullptr; });
  TRIAD_CHECK(free != slots_.end(), "a text for {} slots, none of which is free", slots_.size());
  *free = {&text, context_};
}

// Appends each running text's last token, and returns the tokens that are likeliest then; empty if no text runs.
std::vector<int32_t> Slots::decode() {
  std::vector<int32_t> last(slots_.size(), 0);
  std::vector<int64_t> idle;
  bool any = false;
  for (size_t b = 0; b < slots_.size(); ++b) {
    Slot& s = slots_[b];
    const auto slot = static_cast<int64_t>(b);
    if (s.text != nullptr && s.starts == 0 && session_.decoder().length(slot) == context_)
      s.starts = std::max<int64_t>(1, context_ / 2);
    if (s.runs()) {
      last[b] = s.text->tokens.back();
      any = true;
    } else {
      idle.push_back(slot);
    }
  }
  return any ? session_.step_greedy(last, idle) : std::vector<int32_t>();
}

// Whether texts that are to start do so now: a free slot says that no more will come.
bool Slots::may_start() const {
  const auto running = std::count_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.runs(); });
  return running == 0 || has_room() || static_cast<int64_t>(slots_.size()) - running >= together_;
}

// Starts new texts, and those whose cache is full; returns whether there were any.
bool Slots::start() {
  if (!may_start()) return false;
  std::vector<DecodeSession::Start> starts;
  for (size_t b = 0; b < slots_.size(); ++b) {
    Slot& s = slots_[b];
    if (s.text == nullptr || s.starts == 0) continue;
    starts.push_back({static_cast<int64_t>(b), s.text->last(s.starts)});
    s.starts = 0;
  }
  if (!starts.empty()) session_.start(starts);
  return !starts.empty();
}

int32_t Slots::sample(int64_t b, int32_t likeliest) {
  const Continuation& text = *slots_[static_cast<size_t>(b)].text;
  const bool greedy = text.sampling.temperature <= 0;
  if (greedy && likeliest >= 0) return likeliest;
  const std::vector<float> logits = session_.logits(b);
  for (size_t i = 0; i < logits.size(); ++i)
    TRIAD_CHECK(std::isfinite(logits[i]), "{}: the logit of token {} is {}: weights that are not finite?", model_, i,
                logits[i]);
  return sample_token(logits, text.sampling, text.random.uniform(static_cast<uint64_t>(text.sampled())));
}

void Slots::step(const Took& took) {
  std::vector<int32_t> likeliest = decode();
  if (start()) likeliest = session_.choose_greedy();
  for (size_t b = 0; b < slots_.size(); ++b) {
    Slot& s = slots_[b];
    if (s.runs() && took(*s.text, sample(static_cast<int64_t>(b), likeliest[b]))) s = {};
  }
}

int64_t default_slots(Device device) { return device.is_cuda() ? 64 : 16; }

std::unique_ptr<DecodeSession> open_slots(const ModelConfig& model, DecodeSession::Options options, int64_t batch,
                                          bool asked) {
  constexpr double kGiB = 0x1p30;
  constexpr int64_t kLeftFree = int64_t{256} << 20;  // bytes for libraries, and on the CPU for other programs
  const int64_t free = backend::info(options.device).free_bytes, room = free - std::min(kLeftFree, free / 4);
  options.starts = true;
  const auto bytes = [&](int64_t sequences) {
    options.batch = sequences;
    return DecodeSession::planned_bytes(model, options);
  };
  const int64_t needed = bytes(batch);
  if (needed > room) {
    int64_t fits = 0, above = batch;  // `fits` sequences fit, `above` don't
    while (above - fits > 1) {
      const int64_t middle = (fits + above) / 2;
      (bytes(middle) <= room ? fits : above) = middle;
    }
    if (asked || fits == 0)
      fail("{} of {} tokens (--context) and the model need {:.2f} GiB on {}, where {:.2f} GiB are free: {}",
           counted(fits == 0 ? 1 : batch, "sequence"), options.context,
           static_cast<double>(fits == 0 ? bytes(1) : needed) / kGiB, options.device.str(),
           static_cast<double>(room) / kGiB,
           fits == 0 ? "a smaller --context is needed, or --dtype bf16" : fmt::format("--batch {} fits", fits));
    batch = fits;
  }
  options.batch = batch;
  return std::make_unique<DecodeSession>(model, options);
}

}  // namespace triad
