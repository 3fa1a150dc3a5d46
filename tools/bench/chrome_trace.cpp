#include "tools/bench/chrome_trace.h"

#include <fmt/format.h>

#include <chrono>
#include <set>
#include <vector>

#include "io/json_config.h"
#include "tools/bench/kernel_trace.h"

namespace triad {

namespace {

struct Slice {
  std::string name, kernel;
  int64_t lane, begin_ns, end_ns;
};

// Records ops on the CPU by the host's clock: there an op is finished when its call returns.
class HostOps final : public OpListener {
 public:
  explicit HostOps(Context& ctx) : ctx_(ctx) { ctx_.listeners->push_back(this); }
  ~HostOps() override { std::erase(*ctx_.listeners, this); }
  void begin(const char* op) override { slices_.push_back({op, "", 0, now_ns(), 0}); }
  void end() override { slices_.back().end_ns = now_ns(); }
  const std::vector<Slice>& slices() const { return slices_; }

 private:
  static int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  Context& ctx_;
  std::vector<Slice> slices_;
};

std::vector<Slice> record(Context& ctx, const std::function<void()>& work) {
  if (!ctx.device.is_cuda()) {
    const HostOps ops(ctx);
    work();
    return ops.slices();
  }
  KernelTrace kernels(ctx);
  work();
  std::vector<Slice> slices;
  for (const Activity& a : kernels.finish())
    slices.push_back({a.op.empty() ? a.kernel : a.op, a.kernel, a.stream, a.begin_ns, a.end_ns});
  return slices;
}

}  // namespace

std::string chrome_trace(Context& ctx, const std::function<void()>& queued_work) {
  const std::vector<Slice> slices = record(ctx, queued_work);
  Json events = Json::array();
  std::set<int64_t> lanes;
  constexpr double kNsPerUs = 1e3;
  const int64_t first_ns = slices.empty() ? 0 : slices.front().begin_ns;
  for (const Slice& s : slices) {
    lanes.insert(s.lane);
    Json event = {{"name", s.name},
                  {"cat", s.kernel.empty() ? "op" : "kernel"},
                  {"ph", "X"},  // a complete event, which has a begin and a duration
                  {"ts", static_cast<double>(s.begin_ns - first_ns) / kNsPerUs},
                  {"dur", static_cast<double>(s.end_ns - s.begin_ns) / kNsPerUs},
                  {"pid", 0},
                  {"tid", s.lane}};
    if (!s.kernel.empty()) event["args"] = {{"kernel", s.kernel}};
    events.push_back(std::move(event));
  }
  const auto named = [&](const char* what, int64_t lane, const std::string& name) {
    events.push_back({{"name", what}, {"ph", "M"}, {"pid", 0}, {"tid", lane}, {"args", {{"name", name}}}});
  };
  named("process_name", 0, "triad, one step on " + ctx.device.str());
  for (const int64_t lane : lanes)
    named("thread_name", lane, ctx.device.is_cuda() ? fmt::format("stream {}", lane) : "host");
  return dump_json({{"traceEvents", events}, {"displayTimeUnit", "ms"}}, -1) + "\n";
}

}  // namespace triad
