// The progress line of this process's terminal, which is overwritten in place. There is one at most: whoever writes
// something else to the terminal ends it first, so that the two do not run into each other.
#pragma once
#include <span>
#include <string>

namespace triad {

bool is_terminal(int fd);
int terminal_columns(int fd);  // 80 where the terminal does not say

// A part of a line. Of a line that is too long the pieces of the highest rank are left out first; rank 0 stays.
struct LinePiece {
  std::string text;
  int rank = 0;
};
// The pieces that fit, with two spaces between them; cut where not even those of rank 0 do.
std::string fit_line(std::span<const LinePiece>, int columns);
// A text of one line, cut where it is longer; `end` stands behind what was cut.
std::string cut_line(const std::string& text, int columns, const std::string& end = "...");

// Overwrites the progress line. What the streams still hold goes first.
void show_progress_line(int fd, const std::string& line);
// What is written next begins a line of its own. A signal handler may call it.
void end_progress_line() noexcept;

}  // namespace triad
