// Runs programs for the doctor and watches them. A program that shows no sign of life, or that exceeds its time, is
// killed with all processes that it started and no others. A child that hangs or crashes does not affect the doctor.
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

// Which environment variables of the doctor a child inherits. clean: none of those that change a run's config or that
// make it a rank of a launcher (NSA_*, RANK, OMPI_COMM_WORLD_*, ...).
enum class Inherit { all, clean };

struct TimeLimits {
  // Total time. A program that exceeds it ends as `late` if it shows a sign of life then, else possibly as `silent`.
  double limit_s = 0;
  double silent_s = 0;  // longest time without a sign of life, which is output or a heartbeat
  // True: CPU time counts as a sign of life too, for programs that print nothing while they work.
  bool busy_is_alive = false;
};

struct Outcome {
  // How the commands ended. hung: their own watchdog reported a hang; late: they were alive at limit_s.
  enum class How { exited, silent, hung, late };
  How how = How::exited;
  int exit_code = 0;      // exit code of the first command that did not return 0; 128 + signal if a signal ended it
  double seconds = 0;     // running time without stopped_s
  double stopped_s = 0;   // time for which the machine or the doctor was suspended
  std::string last_sign;  // text of the last heartbeat or the last line of output
};

// Runs the commands concurrently. Their output goes to folder/output.txt; their heartbeats are read from the folder.
Outcome run_commands(const std::vector<Command>&, Inherit, const std::string& folder, const TimeLimits&);

std::string find_program(const std::string& name);  // path of the program found on PATH, or ""
std::string own_program();                          // path of this program's file

}  // namespace triad
