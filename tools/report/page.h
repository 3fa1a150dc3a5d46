// The report as one self-contained HTML file, which includes style, script and data.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "tools/report/run.h"

namespace triad {

struct Page {
  std::vector<ReportRun> runs;
  std::string file;                                              // where the page will lie, for links to other reports
  std::string folder = {};                                       // a folder of runs; empty: the runs were named
  std::vector<std::pair<std::string, std::string>> unread = {};  // folders that could not be read, and why
  double refresh_s = 0;                                          // the page loads itself anew this often; 0: never
};

// Returns the page's HTML: all about one run or two, or a table of more with the charts that they share. Names the runs
// in their data (`label`).
std::string report_page(Page&);

// Contents of tools/report/page.css and the scripts; the build embeds them in the program.
extern const char* const kReportStyle;
extern const char* const kReportScript;

}  // namespace triad
