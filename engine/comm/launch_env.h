// LaunchEnv: rank and world of this process, read from the variables that mpirun, srun and torchrun set. A process
// started without them is a world of one.
#pragma once
#include <cstddef>
#include <string>

namespace triad {

struct LaunchEnv {
  std::string launcher;  // "torchrun", "Open MPI", "PMI", "Slurm"; empty: none
  int rank = 0, world = 1;
  int local_rank = 0, local_world = 1;  // among the processes of this host; local_world 0: unknown
  bool speaks_mpi = false;              // the launcher has set up MPI
  std::string master_host;              // MASTER_ADDR, MASTER_PORT: the TCP rendezvous of processes without MPI
  int master_port = 0;
  bool port_taken = false;  // torchrun's own store listens at master_port
  // For the TCP rendezvous: the id separates runs, the secret excludes unknown processes.
  std::string run_id{};  // torchrun's, else Slurm's job and step; empty: none
  std::string secret{};  // TRIAD_SECRET; must never be printed or written
};
inline constexpr size_t kMaxRunIdBytes = 255;

// Throws UsageError, with the variables and their values, if they contradict each other.
LaunchEnv read_launch_env();

bool peer_access_disabled();  // by NCCL_P2P_DISABLE, which forbids access between GPUs' memories

}  // namespace triad
