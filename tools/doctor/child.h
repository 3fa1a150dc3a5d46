// Runs programs for the doctor and watches them. One that shows no sign of life, or exceeds its time, is killed with
// all processes that it started and no others. A child that hangs or crashes does not affect the doctor.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace triad {

struct Command {
  std::vector<std::string> words;                                     // program and arguments
  std::vector<std::pair<std::string, std::string>> environment = {};  // set in addition to what is inherited
};

// Which environment variables of the doctor a child inherits. clean: none that changes a run's config or makes it a
// rank of a launcher (NSA_*, RANK, OMPI_COMM_WORLD_*, ...).
enum class Inherit { all, clean };

struct TimeLimits {
  double limit_s = 0;  // total time; a program beyond it is late if it then shows a sign of life, else it may be silent
  double silent_s = 0;         // time without a sign of life: output or a heartbeat
  bool busy_is_alive = false;  // CPU time counts as a sign of life too: for programs that print nothing while they work
};

struct Outcome {
  enum class How { exited, silent, hung, late };  // hung: reported by its own watchdog; late: alive at limit_s
  How how = How::exited;
  int exit_code = 0;      // of the first command with one that is not 0; 128 + signal if a signal ended it
  double seconds = 0;     // running time, without stopped_s
  double stopped_s = 0;   // time in which the machine or the doctor was suspended
  std::string last_sign;  // the last heartbeat or line of output
};

// Runs the commands concurrently. Their output is written to folder/output.txt; their heartbeats are read from the
// folder.
Outcome run_commands(const std::vector<Command>&, Inherit, const std::string& folder, const TimeLimits&);

std::string find_program(const std::string& name);  // its file on PATH, or ""
std::string own_program();                          // the file of this program

}  // namespace triad
