// Runs programs for the doctor and watches them. A program that shows no life sign, or that exceeds its time, is killed
// with all processes that it started and no others. A child that hangs or crashes does not affect the doctor.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace triad {

struct Command {
  std::vector<std::string> words;  // the program and its arguments
  // Variables that are set in addition to the inherited ones.
  std::vector<std::pair<std::string, std::string>> environment = {};
};

// Which of the doctor's environment variables a child inherits. clean: none that change a run's config or make it a
// launcher's rank (NSA_*, RANK, OMPI_COMM_WORLD_*, ...).
enum class Inherit { all, clean };

struct TimeLimits {
  // Total time. A program that exceeds it ends as `late` if it shows a life sign then, else possibly as `silent`.
  double limit_s = 0;
  double silent_s = 0;  // longest time without a life sign (output or a heartbeat)
  // True: CPU time counts as a life sign too, for programs that print nothing while they work.
  bool busy_is_alive = false;
};

struct Outcome {
  // How the commands ended. hung: their own watchdog reported a hang; late: they were alive at limit_s.
  enum class How { exited, silent, hung, late };
  How how = How::exited;
  int exit_code = 0;      // the first nonzero exit code; 128 + signal if a signal ended it
  double seconds = 0;     // running time without stopped_s
  double stopped_s = 0;   // time for which the machine or the doctor was suspended
  std::string last_sign;  // the last heartbeat's text or the last output line
};

// Runs the commands concurrently. Their output goes to folder/output.txt; their heartbeats are read from the folder.
Outcome run_commands(const std::vector<Command>&, Inherit, const std::string& folder, const TimeLimits&);

std::string find_program(const std::string& name);  // the program's path as found on PATH, or ""
std::string own_program();                          // this program's path

}  // namespace triad
