#include "train/monitor/console.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <limits>
#include <vector>

#include "engine/process/progress_line.h"
#include "engine/process/text.h"
#include "engine/process/tone.h"
#include "train/monitor/banner.h"

namespace triad {

Console::Console(const RunFolder& folder, const Comm& comm, bool verbose)
    : comm_(comm),
      // mpirun gives its ranks a pseudo-terminal, so with several ranks is_terminal() says nothing about the user's.
      terminal_(comm.world() == 1 && is_terminal(STDOUT_FILENO)),
      verbose_(verbose),
      log_(folder.file(fmt::format("ranks/rank_{}.log", comm.rank()))) {}

Console::~Console() { end_progress_line(); }

void Console::print(const std::string& text) {
  if (!comm_.first()) return;
  const std::lock_guard lock(terminal_mutex_);
  end_progress_line();
  const bool warns = terminal_ && text.starts_with("warning:");
  std::fputs(((warns ? toned(STDOUT_FILENO, Tone::warning, text) : text) + "\n").c_str(), stdout);
  std::fflush(stdout);
}

// Texts may hold names that a user or a file chose, so that they are made safe for a terminal.
void Console::message(const std::string& said) {
  const std::string text = printable_lines(said);
  log_.append(text + "\n");
  print(text);
}

void Console::detail(const std::string& said) {
  const std::string text = printable_lines(said);
  log_.append(text + "\n");
  if (verbose_) print(text);
}

void Console::alert(const std::string& said) {
  const std::string text = printable_lines(said);
  std::string line = "triad: " + text;
  constexpr int kRows = 3;  // most terminal rows that an alert fills
  if (is_terminal(STDERR_FILENO))
    line =
        cut_line(line, kRows * terminal_columns(STDERR_FILENO), fmt::format("... (ranks/rank_{}.log)", comm_.rank()));
  {
    // The lock is waited for at most 1 s, because the thread that holds it may hang in a write to a blocked terminal,
    // and this alert may be about that hang.
    const std::unique_lock lock(terminal_mutex_, std::chrono::seconds(1));
    end_progress_line();
    std::fputs((toned(STDERR_FILENO, Tone::warning, line) + "\n").c_str(), stderr);
  }
  try {
    log_.append(text + "\n");
  } catch (const std::exception& e) {  // a full disk must not end the run here
    std::fputs(fmt::format("triad: {}\n", e.what()).c_str(), stderr);
  }
}

void Console::waiting(int64_t step, int64_t steps, double seconds, const std::string& where) {
  if (!comm_.first()) return;
  const std::string line =
      fmt::format("step {}/{}  {} so far, {}", step, steps, duration_text(seconds), printable(where));
  const std::unique_lock lock(terminal_mutex_, std::chrono::seconds(1));  // see alert()
  if (terminal_) return show_progress_line(STDOUT_FILENO, cut_line(line, terminal_columns(STDOUT_FILENO) - 1));
  std::fputs((line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

// On a terminal: redraws the progress line as steps complete. Elsewhere: prints a line for each step that has a row in
// training.csv, and one for the first step as an early estimate of the run's duration.
void Console::progress(const StepRecord& s, int64_t steps) {
  constexpr double kRedrawS = 0.5;
  const Clock::time_point now = Clock::now();
  const bool last = s.step == steps;
  const bool redraw = terminal_ && (last || std::chrono::duration<double>(now - line_shown_).count() >= kRedrawS);
  if (!s.row && !redraw && !s.first) return;
  std::vector<LinePiece> pieces = {{fmt::format("step {}/{}", s.step, steps), 0},
                                   {fmt::format("loss {:.4f}", s.loss), 0},
                                   {fmt::format("lr {:.2e}", s.lr), 3},
                                   {fmt::format("norm {:.3f}", s.grad_norm), 2},
                                   {fmt::format("{:.0f} tok/s", s.tokens_per_s), 0},
                                   {fmt::format("{:.1f} ms", s.median_ms), 4},
                                   {fmt::format("eta {}", duration_text(s.eta_s)), 1}};
  if (comm_.world() > 1) pieces.push_back({fmt::format("comm {:.2f} ms", s.row_comm_ms), 5});
  const std::string line = fit_line(pieces, std::numeric_limits<int>::max());
  if (s.row || s.first) log_.append(line + "\n");
  if (!comm_.first()) return;
  if (!terminal_) return print(line);
  const std::lock_guard lock(terminal_mutex_);
  show_progress_line(STDOUT_FILENO, fit_line(pieces, terminal_columns(STDOUT_FILENO) - 1));
  line_shown_ = now;
}

}  // namespace triad
