// The loop of a run: data -> step -> telemetry -> checkpoints, from config to the final weights.
#pragma once
#include <string>
#include <vector>

#include "train/config.h"

namespace triad {

struct TrainRequest {
  Config config;
  std::vector<std::string> environment;  // what the environment changed
  std::string resume;                    // a checkpoint, a run folder, or "latest"; empty: none
  bool overwrite = false;
  bool verbose = false;           // print what else goes to the log alone
  std::string build;              // for env.json
  std::string program = "triad";  // as it was called, for the command that goes on after a stop
  std::string config_file;        // where the config is from; empty: from a run
};

// Returns when the run is complete, or stopped by SIGTERM, SIGINT or .HALT with a checkpoint. Throws what is wrong
// before it begins; a later error is told on stderr and ends the process: Comm::abandon.
void train(const TrainRequest&);

}  // namespace triad
