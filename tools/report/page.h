// The report as one self-contained HTML file, which includes style, script and data.
#pragma once
#include <string>
#include <vector>

#include "tools/report/run.h"

namespace triad {

// Returns the HTML of the page, for one run or for a comparison of two.
std::string report_page(const std::vector<ReportRun>& runs);

// The contents of tools/report/page.css and of the scripts; the build embeds them in the program.
extern const char* const kReportStyle;
extern const char* const kReportScript;

}  // namespace triad
