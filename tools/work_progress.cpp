#include "tools/work_progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "engine/process/progress_line.h"
#include "engine/process/seconds_since.h"
#include "train/monitor/banner.h"

namespace triad {

namespace {}  // namespace

WorkProgress::WorkProgress(std::string verb, std::string unit, int64_t total)
    : verb_(std::move(verb)),
      unit_(std::move(unit)),
      total_(total),
      terminal_(is_terminal(STDERR_FILENO)),
      began_(std::chrono::steady_clock::now()),
      shown_(began_) {}

WorkProgress::~WorkProgress() { end_progress_line(); }

double WorkProgress::seconds() const { return seconds_since(began_); }

void WorkProgress::show(int64_t done, int64_t tokens) {
  constexpr double kRedrawS = 0.2, kLineS = 30;
  if (seconds_since(shown_) < (terminal_ ? kRedrawS : kLineS) && !(terminal_ && done == total_)) return;
  shown_ = std::chrono::steady_clock::now();
  const double elapsed = std::max(seconds(), 1e-9);
  const double left = done > 0 ? elapsed / static_cast<double>(done) * static_cast<double>(total_ - done) : 0;
  std::vector<LinePiece> pieces = {{fmt::format("{}: {} of {} {}", verb_, done, total_, unit_), 0}};
  if (tokens >= 0) pieces.push_back({fmt::format("{:.0f} tokens/s", static_cast<double>(tokens) / elapsed), 1});
  pieces.push_back({fmt::format("{} left", duration_text(left)), 2});
  constexpr int kAnyLength = 1 << 16;
  if (terminal_)
    show_progress_line(STDERR_FILENO, fit_line(pieces, terminal_columns(STDERR_FILENO) - 1));
  else
    std::fputs((fit_line(pieces, kAnyLength) + "\n").c_str(), stderr);
}

}  // namespace triad
