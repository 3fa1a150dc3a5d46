// A terminal's progress line, which is overwritten in place. A process has at most one. end_progress_line() must be
// called before anything else is written to the terminal.
#pragma once
#include <span>
#include <string>

namespace triad {

bool is_terminal(int fd);
int terminal_columns(int fd);  // columns; 80 if the terminal does not report them

// What a line says about one rank. If the line is too long, the highest ranks' pieces are dropped first; rank 0's
// pieces stay.
struct LinePiece {
  std::string text;
  int rank = 0;
};
// Joins the pieces that fit, with two spaces between them. Truncates the line if even rank 0's do not fit.
std::string fit_line(std::span<const LinePiece>, int columns);
// Truncates a text that is longer than `columns`; the result's last characters are then `end`.
std::string cut_line(const std::string& text, int columns, const std::string& end = "...");

// Overwrites the progress line. Flushes stdout and stderr first.
void show_progress_line(int fd, const std::string& line);
// Ends the progress line, so that the next output begins on a new line. May be called in a signal handler.
void end_progress_line() noexcept;

}  // namespace triad
