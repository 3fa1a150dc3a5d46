// The table of many runs: a row for each, with its status, its last numbers, and the config keys in which runs differ.
#pragma once
#include <string>

#include "tools/report/page.h"

namespace triad {

// Sets each run's label. Of runs that the command names: A and B for two, none for one. Else the shortest ends of their
// paths that differ.
void name_runs(Page&);

std::string runs_table(const Page&);

// A card that lists each differing key's values, and the runs that have them; empty if no key differs.
std::string differing_keys_card(const std::vector<ReportRun>&);

// Leaves what the page of a folder of runs draws of each run, with fewer points the more runs there are.
void make_lean(ReportRun&, size_t runs);

}  // namespace triad
