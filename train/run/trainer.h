// train(): a training run from config to final weights: data, steps, telemetry, evaluations and checkpoints.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "train/config/config.h"

namespace triad {

struct TrainRequest {
  Config config;
  std::vector<std::string> environment;  // keys changed by the environment, a line each
  std::string resume;                    // a checkpoint, a run's folder, "latest" or "auto"; empty: none
  bool overwrite = false;
  bool accept_changed_data = false;  // resume although the data differ from the checkpoint's
  bool verbose = false;              // also print lines that otherwise go only to the log
  std::string build;                 // build description, for env.json
  std::string program = "triad";     // argv[0], for the printed command that resumes the run
  std::string config_file;           // config file path; empty: the config is from a run's folder
};

// Runs work() so that its errors name the rank, and the host if there may be several.
void name_rank_in_errors(const std::function<void()>& work);

// Returns when the run is complete, or stopped by SIGTERM, SIGINT or .HALT with a checkpoint. Throws errors found
// before the ranks start training; a later error is printed to stderr and ends the process (Comm::abandon).
void train(const TrainRequest&);

}  // namespace triad
