// The report as one HTML file that needs nothing else: style, script and data are in it.
#pragma once
#include <string>
#include <vector>

#include "tools/report/run.h"

namespace triad {

// Of one run, or of two beside each other.
std::string report_page(const std::vector<ReportRun>& runs);

// tools/report/*, as the build found them.
extern const char* const kReportStyle;
extern const char* const kReportScript;

}  // namespace triad
