// The progress line, which is overwritten in place. A process has at most one: before anything else is written to its
// terminal, end_progress_line() must be called.
#pragma once
#include <span>
#include <string>

namespace triad {

bool is_terminal(int fd);
int terminal_columns(int fd);  // 80 if the terminal does not report them

// A part of a line, about one rank. If the line is too long, the pieces of the highest ranks are dropped first; rank
// 0's stay.
struct LinePiece {
  std::string text;
  int rank = 0;
};
// Joins the pieces that fit with two spaces; truncates the line if even rank 0's do not fit.
std::string fit_line(std::span<const LinePiece>, int columns);
// Truncates a text that is longer than `columns`, with `end` as its last characters.
std::string cut_line(const std::string& text, int columns, const std::string& end = "...");

// Overwrites the progress line, after flushing stdout and stderr.
void show_progress_line(int fd, const std::string& line);
// Ends the progress line, so that the next output begins a new line. Safe in a signal handler.
void end_progress_line() noexcept;

}  // namespace triad
