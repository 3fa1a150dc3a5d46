#include "model/exchange_meter.h"

#include <algorithm>

#include "engine/check.h"

namespace triad {

ExchangeMeter::ExchangeMeter(Context& ctx, ContextGroup& group) : ctx_(ctx), group_(group) {
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
  for (size_t i = 0; i < std::min(waited_, waits_.size()); ++i)
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

void ExchangeMeter::moved(const std::string& what, int64_t sent, int64_t received) {
  Kind& kind = kinds_[kind_of(what)];
  kind.layers.insert(layer_);
  ++kind.totals.calls;
  kind.totals.sent += sent;
  kind.totals.received += received;
}

size_t ExchangeMeter::wait_begins(const std::string& what, const Stream& stream) {
  const size_t wait = waited_++;
  if (wait < waits_.size()) {
    waits_[wait].kind = kind_of(what);
    waits_[wait].begin.record(stream);
  }
  return wait;
}

void ExchangeMeter::wait_ends(size_t wait, const Stream& stream) {
  if (wait < waits_.size()) waits_[wait].end.record(stream);
}

}  // namespace triad
