#include "tools/bench/exchanges.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/check.h"
#include "tools/bench/measure.h"
#include "tools/bench/ranks.h"

namespace triad {

double measure_links(Device device, Comm& group) {
  constexpr int kWarmUps = 2, kRuns = 5;
  const int64_t others = group.world() - 1, total = device.is_cuda() ? int64_t{1} << 28 : int64_t{1} << 23,
                bytes = total / others;
  Arena arena(device, 2 * others * align_up(bytes));
  const auto memory = [&] { return arena.alloc(MemTag::workspace, "exchanged", DType::u8, {bytes}); };
  std::vector<Comm::ConstPiece> to;
  std::vector<Comm::Piece> from;
  for (int r = 0; r < group.world(); ++r) {
    if (r == group.rank()) continue;
    to.push_back({r, memory()});
    from.push_back({r, memory()});
  }
  std::vector<double> ms;
  for (int i = 0; i < kWarmUps + kRuns; ++i) {
    Event begin(device, true), end(device, true);
    group.barrier("the measurement of the links");
    begin.record(group.stream());
    group.exchange(to, from, bytes, "bytes to measure the links");
    end.record(group.stream());
    group.stream().synchronize();
    if (i >= kWarmUps) ms.push_back(end.ms_since(begin));
  }
  const std::vector<double> medians = group.all_gather_host(median(ms), "the times of the links");
  return static_cast<double>(others * bytes) / *std::max_element(medians.begin(), medians.end()) * 1e3;
}

Json gather_exchanges(Comm& comm, const std::vector<ExchangeTotals>& totals, int64_t steps) {
  Json mine = Json::array(), all = Json::array();
  for (const ExchangeTotals& t : totals)
    mine.push_back({{"sent", t.sent / steps},
                    {"received", t.received / steps},
                    {"exposed_us", t.waited_ms * 1e3 / static_cast<double>(steps)}});
  for (const ExchangeTotals& t : totals)
    all.push_back({{"kind", t.kind},
                   {"pass", t.backward ? "backward" : "forward"},
                   {"layers", t.layers},
                   {"calls", t.calls / steps},
                   {"ranks", Json::array()}});
  for (const std::string& text : comm.all_gather_host_text(dump_json(mine, -1), "the exchanges")) {
    const Json rows = parse_json(text, "the exchanges of a rank");
    TRIAD_CHECK(rows.size() == all.size(), "a rank has {} kinds of exchanges, another {}", rows.size(), all.size());
    for (size_t i = 0; i < all.size(); ++i) all[i]["ranks"].push_back(rows[i]);
  }
  return all;
}

void print_exchanges(const Json& exchanges, double links, int64_t micro_steps) {
  constexpr double kMB = 1e6;
  fmt::print(
      "\nexchanges of the ranks that share a sequence: MB (10^6 bytes) of the rank with the most, and the longest time "
      "that a rank's compute stream waits\n{:<44} {:<8} {:>6} {:>22} {:>22} {:>12} {:>11}\n{:<44} {:<8} {:>6} {:>11} "
      "{:>10} {:>11} {:>10} {:>12} {:>11}\n",
      "", "", "", "of a layer", "of a step", "at the rate", "exposed", "kind", "pass", "layers", "sent", "received",
      "sent", "received", "of links ms", "ms");
  double sum_ms = 0, sum_exposed = 0;
  for (const Json& e : exchanges) {
    double sent = 0, received = 0, exposed = 0, most = 0;
    for (const Json& rank : e["ranks"]) {
      sent = std::max(sent, rank["sent"].get<double>());
      received = std::max(received, rank["received"].get<double>());
      exposed = std::max(exposed, rank["exposed_us"].get<double>() * 1e-3);
    }
    most = std::max(sent, received);
    const double layer_mb = kMB * e["layers"].get<double>() * static_cast<double>(micro_steps);
    sum_ms += most / links * 1e3, sum_exposed += exposed;
    fmt::print("{:<44} {:<8} {:>6} {:>11.3f} {:>10.3f} {:>11.3f} {:>10.3f} {:>12.3f} {:>11.3f}\n",
               e["kind"].get<std::string>(), e["pass"].get<std::string>(), e["layers"].get<int64_t>(), sent / layer_mb,
               received / layer_mb, sent / kMB, received / kMB, most / links * 1e3, exposed);
  }
  fmt::print(
      "{:<44} {:<8} {:>6} {:>45} {:>12.3f} {:>11.3f}\none large exchange between these ranks, all with all: {:.2f} "
      "GB/s sent, and as much received\n",
      "all", "", "", "", sum_ms, sum_exposed, links * 1e-9);
}

}  // namespace triad
