#include "engine/process/tone.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "engine/process/progress_line.h"

namespace triad {

bool has_colours(int fd) {
  if (!is_terminal(fd)) return false;
  if (const char* no = std::getenv("NO_COLOR"); no != nullptr && *no != '\0') return false;
  if (const char* term = std::getenv("TERM"); term == nullptr || std::strcmp(term, "dumb") == 0) return false;
  for (const char* rank : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "RANK"})
    if (std::getenv(rank) != nullptr) return false;
  return true;
}

std::string toned(int fd, Tone tone, const std::string& text) {
  if (!has_colours(fd)) return text;
  const char* const colour = tone == Tone::error ? "\x1b[31m" : "\x1b[33m";
  return colour + text + "\x1b[0m";
}

void print_problem(Tone tone, const std::string& text) {
  end_progress_line();
  std::fputs((toned(STDERR_FILENO, tone, "triad: " + text) + "\n").c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace triad
