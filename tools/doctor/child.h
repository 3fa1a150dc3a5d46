// Programs that the doctor starts: watched for signs of life, and ended, with all that they started and nothing else,
// when there are none or their time is over. A child that hangs or crashes takes nothing along.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace triad {

struct Command {
  std::vector<std::string> words;  // the program first
  std::vector<std::pair<std::string, std::string>> environment = {};
};

// Which of the doctor's own variables its children see. clean: none that would change a run or make it a rank of the
// doctor's own launcher (NSA_*, RANK, OMPI_COMM_WORLD_*, ...).
enum class Inherit { all, clean };

struct Patience {
  double limit_s = 0;          // in all; who has told nothing since then is not late, but may be silent
  double silent_s = 0;         // without a sign of life: a line of output, a heartbeat, ...
  bool busy_is_alive = false;  // ... or, of a program that prints nothing meanwhile, time on a processor
};

struct Ended {
  enum class How { exited, silent, hung, late };  // hung: its own watchdog says so; late: alive, at its limit
  How how = How::exited;
  int exit_code = 0;                // where it exited: 128 + signal if one ended it; of several the first that is not 0
  double seconds = 0, still_s = 0;  // those in which the machine, or the doctor, stood still apart
  std::string last_sign;            // of life: its last heartbeat, or line of output
};

// Runs them side by side; what they print goes to folder/output.txt, and their heartbeats are looked for in the folder.
Ended run_commands(const std::vector<Command>&, Inherit, const std::string& folder, const Patience&);

std::string find_program(const std::string& name);  // on PATH; "" if it is not there
std::string own_program();                          // this one's file

}  // namespace triad
