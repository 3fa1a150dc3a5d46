// Who am I among the processes of a run: read from the variables that mpirun, srun and torchrun set. A process that
// none of them started is a world of one.
#pragma once
#include <cstddef>
#include <string>

namespace triad {

struct LaunchEnv {
  std::string launcher;  // "torchrun", "Open MPI", "PMI", "Slurm"; empty: started by hand
  int rank = 0, world = 1;
  int local_rank = 0, local_world = 1;  // among the processes of this host; local_world 0: the launcher does not say
  bool speaks_mpi = false;              // the launcher has told MPI how to find the others
  std::string master_host;              // MASTER_ADDR, MASTER_PORT: where processes without MPI meet
  int master_port = 0;
  bool port_taken = false;  // torchrun's own store listens at master_port
  // Where processes meet by TCP, the id keeps runs apart and the secret keeps strangers out.
  std::string run_id{};  // torchrun's, else Slurm's job and step; empty: there is none
  std::string secret{};  // TRIAD_SECRET; never printed and never written
};
inline constexpr size_t kMaxRunIdBytes = 255;

// Throws UsageError, with the variables and their values, if they contradict each other.
LaunchEnv read_launch_env();

bool peer_access_disabled();  // by NCCL_P2P_DISABLE, which users set where GPUs are not to reach each other's memory

}  // namespace triad
