// LaunchEnv: this process's rank and world, read from the variables that mpirun, srun and torchrun set. A process
// started without them is a world by itself.
#pragma once
#include <cstddef>
#include <string>

namespace triad {

struct LaunchEnv {
  std::string launcher;  // "torchrun", "Open MPI", "PMI", "Slurm"; empty: started without a launcher
  int rank = 0, world = 1;
  int local_rank = 0, local_world = 1;  // this process's index on its host, and how many the host has; local_world 0:
                                        // unknown
  bool speaks_mpi = false;              // the launcher has prepared MPI, so MPI_Init finds the other ranks
  // MASTER_ADDR and MASTER_PORT, for ranks that connect over TCP (rendezvous.h): rank 0's host, and the first port at
  // which it may listen; 0: not set. Where srun has set neither, they are the step's first host, on which srun starts
  // rank 0, and a port by job number.
  std::string master_host;
  int master_port = 0;
  bool port_taken = false;  // torchrun's own key-value store listens at master_port
  // The TCP rendezvous uses the id to separate runs and the secret to exclude other processes.
  std::string run_id{};  // torchrun's run id, else Slurm's job and step; empty: none
  std::string secret{};  // TRIAD_SECRET; must never be printed or written
};
// The longest run id, in bytes.
inline constexpr size_t kMaxRunIdBytes = 255;

// Throws UsageError, with the variables and their values, if they contradict each other.
LaunchEnv read_launch_env();

std::string host_name();      // this host's
bool peer_access_disabled();  // whether NCCL_P2P_DISABLE forbids access between GPU memories

}  // namespace triad
