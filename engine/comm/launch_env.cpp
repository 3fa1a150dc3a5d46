#include "engine/comm/launch_env.h"

#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>

#include "engine/check.h"

namespace triad {

namespace {

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

// A variable's value, which must be an integer in [least, most]; throws UsageError otherwise.
int number(const char* name, int least, int most) {
  const char* text = variable(name);
  if (text == nullptr) fail_usage("launch: {} is not set, though the launcher's other variables are", name);
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error != std::errc() || stop != end || value < least || value > most)
    fail_usage("launch: {} is \"{}\": a whole number of {} .. {} is needed", name, text, least, most);
  return value;
}

// One launcher's variable names. A launcher counts as present if rank and world are both set, since a single one may be
// inherited from another environment.
struct Names {
  const char *launcher, *rank, *world, *local_rank, *local_world;
};
constexpr Names kLaunchers[] = {
    // torchrun is first, because mpirun or srun may have started torchrun's agents.
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    // SLURM_STEP_NUM_TASKS, which only srun sets: a batch script that runs without srun is one process, even in a
    // larger job.
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr},
};

// The run id: torchrun's, unless it is "none" (absent), else Slurm's job id. For ranks that srun started, the step
// number is added, because a job may contain several runs.
std::string find_run_id(std::string_view launcher) {
  const char* const torchrun = variable("TORCHELASTIC_RUN_ID");
  const char *const job = variable("SLURM_JOB_ID"), *const step = variable("SLURM_STEP_ID");
  std::string id;
  if (torchrun != nullptr && std::string_view(torchrun) != "none")
    id = torchrun;
  else if (job != nullptr)
    id = launcher == "Slurm" && step != nullptr ? fmt::format("{}.{}", job, step) : job;
  if (id.size() > kMaxRunIdBytes)
    fail_usage("launch: the run's id (TORCHELASTIC_RUN_ID or SLURM_JOB_ID) has {} bytes: at most {} are allowed",
               id.size(), kMaxRunIdBytes);
  return id;
}

// The first host in Slurm's list: "n07" for "n[07-09,12],login", "a1b3" for "a[1-2]b[3-4]".
std::string first_host(std::string_view list) {
  std::string host;
  bool in_brackets = false, skips = false;
  for (const char c : list) {
    if (c == ',' && !in_brackets) break;
    if (c == '[' || c == ']') {
      in_brackets = c == '[', skips = false;
      continue;
    }
    skips = skips || (in_brackets && (c == ',' || c == '-'));
    if (!skips) host += c;
  }
  return host;
}

// A port for a job, below those that Linux gives to outgoing connections.
int port_of_job(std::string_view job) {
  constexpr int kBegin = 15'000, kPorts = 10'000;
  int number = 0;
  for (const char c : job)
    if (c >= '0' && c <= '9') number = (number * 10 + (c - '0')) % kPorts;
  return kBegin + number;
}

}  // namespace

LaunchEnv read_launch_env() {
  LaunchEnv env;
  for (const Names& names : kLaunchers) {
    if (variable(names.rank) == nullptr || variable(names.world) == nullptr) continue;
    constexpr int kMostRanks = 1 << 20;
    env.launcher = names.launcher;
    env.world = number(names.world, 1, kMostRanks);
    env.rank = number(names.rank, 0, kMostRanks);
    if (env.rank >= env.world)
      fail_usage("launch: {} is {}, but {} is {}", names.rank, env.rank, names.world, env.world);
    const bool has_local = variable(names.local_rank) != nullptr;
    if (!has_local && std::string_view(names.launcher) == "PMI" && variable("SLURM_LOCALID") != nullptr)
      env.local_rank = number("SLURM_LOCALID", 0, env.world - 1);
    else if (has_local || env.world > 1)
      env.local_rank = number(names.local_rank, 0, env.world - 1);
    env.local_world = 0;
    if (names.local_world != nullptr && variable(names.local_world) != nullptr)
      env.local_world = number(names.local_world, 1, env.world);
    if (env.local_world > 0 && env.local_rank >= env.local_world)
      fail_usage("launch: {} is {}, but {} is {}", names.local_rank, env.local_rank, names.local_world,
                 env.local_world);
    const bool pmi = variable("PMIX_RANK") != nullptr || variable("PMI_RANK") != nullptr;  // srun --mpi=pmix or pmi2
    const std::string_view launcher = env.launcher;
    env.speaks_mpi = launcher == "Open MPI" || launcher == "PMI" || (launcher == "Slurm" && pmi);
    break;
  }
  if (const char* host = variable("MASTER_ADDR")) env.master_host = host;
  if (variable("MASTER_PORT") != nullptr) env.master_port = number("MASTER_PORT", 1, 65535);
  if (const char* const hosts = variable("SLURM_STEP_NODELIST");
      hosts != nullptr && (env.launcher == "Slurm" || env.launcher == "PMI")) {
    const char *const nodes = variable("SLURM_STEP_NUM_NODES"), *const job = variable("SLURM_JOB_ID");
    if (env.master_host.empty())
      env.master_host = nodes != nullptr && std::string_view(nodes) == "1" ? "localhost" : first_host(hosts);
    if (env.master_port == 0) env.master_port = port_of_job(job == nullptr ? "" : job);
  }
  const char* store = variable("TORCHELASTIC_USE_AGENT_STORE");
  env.port_taken = store != nullptr && std::string_view(store) == "True";
  env.run_id = find_run_id(env.launcher);
  if (const char* secret = variable("TRIAD_SECRET")) env.secret = secret;
  return env;
}

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

bool peer_access_disabled() {
  const char* const value = std::getenv("NCCL_P2P_DISABLE");
  return value != nullptr && *value != '\0' && *value != '0';
}

}  // namespace triad
