#include "engine/process/progress_line.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>

namespace triad {

namespace {

std::atomic<int> open_on{-1};  // file descriptor with an unfinished progress line; -1: none

}  // namespace

bool is_terminal(int fd) { return isatty(fd) != 0; }

int terminal_columns(int fd) {
  constexpr int kUsual = 80;
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kUsual;
}

std::string cut_line(const std::string& text, int columns, const std::string& end) {
  const auto most = static_cast<size_t>(std::max(columns, 0));
  if (text.size() <= most) return text;
  return most <= end.size() ? text.substr(0, most) : text.substr(0, most - end.size()) + end;
}

std::string fit_line(std::span<const LinePiece> pieces, int columns) {
  int most = 0;
  for (const LinePiece& piece : pieces) most = std::max(most, piece.rank);
  for (;; --most) {
    std::string line;
    for (const LinePiece& piece : pieces)
      if (piece.rank <= most) line += (line.empty() ? "" : "  ") + piece.text;
    if (static_cast<int>(line.size()) <= columns) return line;
    if (most <= 0) return cut_line(line, columns, "");
  }
}

void show_progress_line(int fd, const std::string& line) {
  std::fflush(stdout);
  std::fflush(stderr);
  const std::string bytes = "\r\x1b[2K" + line;
  open_on = fd;
  if (::write(fd, bytes.data(), bytes.size()) < 0) open_on = -1;  // the terminal has been closed
}

void end_progress_line() noexcept {
  const int fd = open_on.exchange(-1);
  if (fd >= 0 && ::write(fd, "\n", 1) < 0) return;  // the terminal has been closed
}

}  // namespace triad
