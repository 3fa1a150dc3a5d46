// triad report: writes one HTML page about a run's folder, or comparing two runs.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <system_error>

#include "engine/check.h"
#include "io/file.h"
#include "io/own_files.h"
#include "tools/report/page.h"
#include "tools/verbs.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

// The page's default path: RUN/report.html, or RUN/report_vs_NAME.html for a comparison.
std::string page_of(const std::string& run, const std::string& versus) {
  if (versus.empty()) return (fs::path(run) / "report.html").string();
  constexpr size_t kLongest = 200;  // length in bytes; a file name has at most 255
  fs::path folder = fs::weakly_canonical(versus);
  if (!folder.has_filename()) folder = folder.parent_path();
  const std::string name = folder.filename().string();
  return (fs::path(run) / ("report_vs_" + name.substr(0, kLongest) + ".html")).string();
}

}  // namespace

void add_report(CLI::App& app) {
  struct Options {
    std::string run, versus, out;
  };
  auto o = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("report", "write one self-contained HTML page about a run, or comparing two");
  verb->add_option("RUN", o->run, "the folder of a run")->required();
  verb->add_option("--vs", o->versus, "the folder of another run, to compare with");
  verb->add_option("--out", o->out, "the file to write (default: RUN/report.html; with --vs: RUN/report_vs_NAME.html)");
  verb->callback([o] {
    std::vector<ReportRun> runs = {read_run(o->run)};
    if (!o->versus.empty()) runs.push_back(read_run(o->versus));
    const std::string out = o->out.empty() ? page_of(o->run, o->versus) : o->out;
    std::error_code absent;
    if (o->out.empty() && fs::exists(fs::symlink_status(out, absent)) && !is_empty_file(out) &&
        head_of(out).find("triad report</title>") == std::string::npos)
      fail("{} is no page that `triad report` has written: move it, or choose a file with --out", out);
    write_file_atomically(out, report_page(runs));
    fmt::print("{}\n", out);
  });
}

}  // namespace triad
