// The report as one self-contained HTML file, with style, script and data.
#pragma once
#include <string>
#include <vector>

#include "tools/report/run.h"

namespace triad {

// The page's HTML, for one run or for a comparison of two.
std::string report_page(const std::vector<ReportRun>& runs);

// The texts of tools/report/page.css and of the scripts; the build embeds them.
extern const char* const kReportStyle;
extern const char* const kReportScript;

}  // namespace triad
