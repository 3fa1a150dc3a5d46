// triad report: writes one HTML page about a run's folder, comparing several, or about a folder of runs. With --watch
// it writes the page again and again until the runs end.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>
#include <thread>

#include "engine/check.h"
#include "engine/process/progress_line.h"
#include "engine/process/text.h"
#include "io/file.h"
#include "io/own_files.h"
#include "tools/options.h"
#include "tools/report/find_runs.h"
#include "tools/report/overview.h"
#include "tools/report/page.h"
#include "tools/verbs.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

struct Options {
  std::string run, out;
  std::vector<std::string> versus;
  bool watch = false;
  double every = 5;
};

volatile std::sig_atomic_t stopped = 0;
void stop(int) { stopped = 1; }

// The page's default path: RUN/report.html, or for a comparison RUN/report_vs_NAME.html.
std::string page_of(const std::string& run, const std::vector<std::string>& versus) {
  if (versus.empty()) return (fs::path(run) / "report.html").string();
  constexpr size_t kLongest = 200;  // length in bytes; a file name has at most 255
  fs::path folder = fs::weakly_canonical(versus.front());
  if (!folder.has_filename()) folder = folder.parent_path();
  const std::string more = versus.size() == 1 ? "" : fmt::format("_and_{}", versus.size() - 1);
  const std::string name = folder.filename().string();
  return (fs::path(run) / ("report_vs_" + name.substr(0, kLongest) + more + ".html")).string();
}

// Reads the runs that the command names. In a folder of runs, one that cannot be read has a row that says so, unless
// none can.
Page read_page(const Options& o) {
  Page page{.runs = {}, .file = o.out.empty() ? page_of(o.run, o.versus) : o.out};
  std::vector<std::string> all = {o.run};
  all.insert(all.end(), o.versus.begin(), o.versus.end());
  std::vector<std::string> folders;
  for (const std::string& path : all) {
    if (is_run(path)) {
      folders.push_back(path);
      continue;
    }
    const std::vector<std::string> found = runs_in(path);
    folders.insert(folders.end(), found.begin(), found.end());
    if (page.folder.empty()) page.folder = path;
  }
  for (const std::string& folder : folders) {
    try {
      page.runs.push_back(read_run(folder));
    } catch (const Error& e) {
      if (page.folder.empty() || (page.runs.empty() && folder == folders.back())) throw;
      fmt::print(stderr, "triad: {}\n", printable(e.what()));
      page.unread.emplace_back(folder, e.what());
    }
  }
  if (!page.folder.empty())
    for (ReportRun& run : page.runs) make_lean(run, page.runs.size());
  return page;
}

bool is_running(const Page& page) {
  return std::any_of(page.runs.begin(), page.runs.end(), [](const ReportRun& run) { return run.status.running; });
}

void write(Page& page) { write_file_atomically(page.file, report_page(page)); }

// What the terminal shows of a page that is written again and again.
std::string progress(const Page& page) {
  std::string text;
  for (const ReportRun& run : page.runs)
    if (run.status.running)
      text += fmt::format("{}{}{}", text.empty() ? "" : "  ", fs::path(run.folder).filename().string(),
                          run.losses.empty() ? ""
                                             : fmt::format(" step {:.0f} loss {:.4f}", run.losses.back().first,
                                                           run.losses.back().second));
  return text + "  (Ctrl-C ends)";
}

// Writes the page every few seconds until no run trains any more, or a signal comes. The last page does not load itself
// anew.
void watch(const Options& o, Page page) {
  std::signal(SIGINT, stop);
  std::signal(SIGTERM, stop);
  std::string last_error;
  while (stopped == 0 && is_running(page)) {
    if (is_terminal(STDERR_FILENO))
      show_progress_line(STDERR_FILENO, cut_line(progress(page), terminal_columns(STDERR_FILENO) - 1));
    const auto next = std::chrono::steady_clock::now() + std::chrono::duration<double>(o.every);
    while (stopped == 0 && std::chrono::steady_clock::now() < next)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    try {
      page = read_page(o);
      page.refresh_s = stopped == 0 && is_running(page) ? o.every : 0;
      write(page);
      last_error.clear();
    } catch (const Error& e) {  // a run that begins anew removes its files first: the next try finds them
      end_progress_line();
      if (last_error != e.what()) fmt::print(stderr, "triad: {}; trying again\n", printable(e.what()));
      last_error = e.what();
    }
  }
  end_progress_line();
  if (page.refresh_s > 0) {  // the signal came while a page was written
    page.refresh_s = 0;
    write(page);
  }
  fmt::print("{}\n", stopped != 0 ? "stopped watching" : "no run trains any more");
}

void report(const Options& o) {
  Page page = read_page(o);
  std::error_code absent;
  if (o.out.empty() && fs::exists(fs::symlink_status(page.file, absent)) && !is_empty_file(page.file) &&
      head_of(page.file).find("triad report</title>") == std::string::npos)
    fail("{} is no page that `triad report` has written: move it, or choose a file with --out", page.file);
  if (o.watch && is_running(page)) page.refresh_s = o.every;
  write(page);
  fmt::print("{}\n", page.file);
  std::fflush(stdout);
  if (o.watch) watch(o, std::move(page));
}

}  // namespace

void add_report(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("report", "write one self-contained HTML page about a run, or comparing several");
  verb->add_option("RUN", o->run, "the folder of a run, or a folder of runs: a table of them all")->required();
  verb->add_option("--vs", o->versus, "the folders of other runs, to compare with; may be repeated");
  verb->add_option("--out", o->out, "the file to write (default: RUN/report.html; with --vs: RUN/report_vs_NAME.html)");
  verb->add_flag("--watch", o->watch, "write the page anew while a run trains; the page loads itself anew, too");
  verb->add_option("--every", o->every, "for --watch: seconds between pages")
      ->check(within(at_least(1).up_to(3600)))
      ->capture_default_str();
  verb->callback([o] { report(*o); });
}

}  // namespace triad
