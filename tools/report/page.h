// The report as one self-contained HTML file, which includes style, script and data.
#pragma once
#include <string>
#include <vector>

#include "tools/report/run.h"

namespace triad {

// Returns the page's HTML, for one run or for comparing two.
std::string report_page(const std::vector<ReportRun>& runs);

// Contents of tools/report/page.css and the scripts; the build embeds them in the program.
extern const char* const kReportStyle;
extern const char* const kReportScript;

}  // namespace triad
