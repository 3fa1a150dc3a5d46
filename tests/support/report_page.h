// `triad report` pages: the JSON in them, and what a browser draws of them.
#pragma once
#include <string>

#include "io/json_config.h"
#include "tests/support/program.h"

namespace triad::test {

std::string report(const std::string& args);  // runs `triad report ARGS`; returns the page
// Returns the JSON in the page's element with this id.
Json data_of(const std::string& page, const std::string& id = "data");
// Writes a file into a run's folder that `triad report` must refuse: exit code 1, the file's name in the message, no
// page.
void check_report_refused(const std::string& folder, const std::string& file, const std::string& content);
size_t count(const std::string& text, const std::string& part);  // how often the text has the part

// Returns false, and says that the test is skipped, if there is no chromium: `if (!require_browser()) return;`.
bool require_browser();
// Returns the page's DOM in a browser, after a script has simulated a user's input. Requires that no script fails and
// that no chart has a number that is not finite. folder: for the page's file.
std::string drawn(const TemporaryFolder& folder, const std::string& page, const std::string& reader = "");

}  // namespace triad::test
