#include "model/sequence/exchange_meter.h"

#include <algorithm>

#include "engine/check.h"

namespace triad {

ExchangeMeter::ExchangeMeter(Context& ctx, SequenceGroup& group) : ctx_(ctx), group_(group) {
  TRIAD_CHECK(ctx.listeners != nullptr, "a context without listeners cannot be measured");
  ctx.listeners->push_back(this);
  group_.measure(this);
}

ExchangeMeter::~ExchangeMeter() {
  group_.measure(nullptr);
  std::erase(*ctx_.listeners, this);
}

void ExchangeMeter::time_waits(int64_t times) {
  waits_.clear();
  for (size_t i = 0; i < waited_ * static_cast<size_t>(times); ++i) waits_.emplace_back(ctx_.device);
  kinds_.clear();
  waited_ = 0;
}

std::vector<ExchangeTotals> ExchangeMeter::totals() const {
  std::vector<ExchangeTotals> all;
  for (const Kind& kind : kinds_) {
    all.push_back(kind.totals);
    all.back().layers = static_cast<int64_t>(kind.layers.size());
  }
  for (size_t i = 0; i < waited_ && !waits_.empty(); ++i)
    all[waits_[i].kind].waited_ms += waits_[i].end.ms_since(waits_[i].begin);
  return all;
}

size_t ExchangeMeter::kind_of(const std::string& what) {
  const std::string kind = what.substr(0, what.rfind(", layer "));
  const auto found = std::find_if(kinds_.begin(), kinds_.end(), [&](const Kind& k) {
    return k.totals.kind == kind && k.totals.backward == backward_;
  });
  if (found != kinds_.end()) return static_cast<size_t>(found - kinds_.begin());
  kinds_.emplace_back().totals = {.kind = kind, .backward = backward_};
  return kinds_.size() - 1;
}

size_t ExchangeMeter::moved(const std::string& what, int64_t sent, int64_t received) {
  const size_t number = kind_of(what);
  Kind& kind = kinds_[number];
  kind.layers.insert(layer_);
  ++kind.totals.calls;
  kind.totals.sent += sent;
  kind.totals.received += received;
  return number;
}

ExchangeMeter::Wait::Wait(ExchangeMeter* meter, size_t kind, const Stream& stream) : meter_(meter), stream_(stream) {
  if (meter_ == nullptr) return;
  number_ = meter_->waited_++;
  if (meter_->waits_.empty()) return;
  TimedWait& timed = meter_->waits_.at(number_);
  timed.kind = kind;
  timed.begin.record(stream);
}

ExchangeMeter::Wait::~Wait() {
  if (meter_ != nullptr && !meter_->waits_.empty()) meter_->waits_[number_].end.record(stream_);
}

}  // namespace triad
