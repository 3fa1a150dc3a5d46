// Exchanges between ranks that share sequences (dist.context), as `triad bench step` prints them.
#pragma once
#include <string>
#include <vector>

#include "io/json_config.h"
#include "model/sequence/exchange_meter.h"

namespace triad {

// Divides the totals over `steps` steps by their number, gathers them from all ranks in the run, and returns them as
// JSON: [{kind, pass, layers, calls, ranks: [{sent, received, exposed_us}]}], bytes and microseconds per step.
// Collective.
Json gather_exchanges(Comm&, const std::vector<ExchangeTotals>&, int64_t steps);

// Prints them as a table, each with the time that it would take at the links' rate, bytes/s (measure_links).
// micro_steps: per step.
void print_exchanges(const Json& exchanges, double links, int64_t micro_steps);

}  // namespace triad
