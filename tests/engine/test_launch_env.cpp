// What ranks read from their launchers' environment variables.
#include "engine/comm/launch_env.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// During an object's lifetime the launchers' environment variables are unset, except for the given ones.
class Variables {
 public:
  using Values = std::vector<std::pair<const char*, const char*>>;
  explicit Variables(std::initializer_list<Values::value_type> set) : Variables(Values(set)) {}
  explicit Variables(const Values& set) {
    for (const char* name : kNames) {
      if (const char* value = std::getenv(name)) before_.emplace_back(name, value);
      unsetenv(name);
    }
    for (const auto& [name, value] : set) {
      REQUIRE(std::find(std::begin(kNames), std::end(kNames), std::string(name)) != std::end(kNames));
      setenv(name, value, 1);
    }
  }
  ~Variables() {
    for (const char* name : kNames) unsetenv(name);
    for (const auto& [name, value] : before_) setenv(name.c_str(), value.c_str(), 1);
  }
  Variables(const Variables&) = delete;

 private:
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "LOCAL_WORLD_SIZE",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "TORCHELASTIC_USE_AGENT_STORE",
                                           "TORCHELASTIC_RUN_ID",
                                           "TRIAD_SECRET",
                                           "OMPI_COMM_WORLD_RANK",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                                           "PMI_RANK",
                                           "PMI_SIZE",
                                           "MPI_LOCALRANKID",
                                           "MPI_LOCALNRANKS",
                                           "PMIX_RANK",
                                           "SLURM_PROCID",
                                           "SLURM_STEP_NUM_TASKS",
                                           "SLURM_LOCALID",
                                           "SLURM_NTASKS",
                                           "SLURM_JOB_ID",
                                           "SLURM_STEP_ID",
                                           "SLURM_STEP_NODELIST",
                                           "SLURM_STEP_NUM_NODES"};
  std::vector<std::pair<std::string, std::string>> before_;
};

}  // namespace

TEST_CASE("dist: rank and world size are read from the variables of each launcher", "[dist]") {
  const auto check = [](const LaunchEnv& e, const char* launcher, int rank, int world, int local, bool mpi) {
    INFO(launcher);
    CHECK(e.launcher == launcher);
    CHECK(e.rank == rank);
    CHECK(e.world == world);
    CHECK(e.local_rank == local);
    CHECK(e.speaks_mpi == mpi);
  };
  {
    const Variables none({});
    check(read_launch_env(), "", 0, 1, 0, false);
  }
  {
    const Variables torchrun({{"RANK", "5"},
                              {"WORLD_SIZE", "8"},
                              {"LOCAL_RANK", "1"},
                              {"LOCAL_WORLD_SIZE", "4"},
                              {"MASTER_ADDR", "node7"},
                              {"MASTER_PORT", "29500"},
                              {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                              {"OMPI_COMM_WORLD_RANK", "0"},
                              {"OMPI_COMM_WORLD_SIZE", "2"}});  // also set, because mpirun started torchrun's agents
    const LaunchEnv e = read_launch_env();
    check(e, "torchrun", 5, 8, 1, false);
    CHECK(e.local_world == 4);
    CHECK(e.master_host == "node7");
    CHECK(e.master_port == 29500);
    CHECK(e.port_taken);
  }
  {
    const Variables mpirun({{"OMPI_COMM_WORLD_RANK", "3"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_RANK", "3"}});
    check(read_launch_env(), "Open MPI", 3, 4, 1, true);
  }
  {
    const Variables hydra({{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "3"}});
    check(read_launch_env(), "PMI", 2, 3, 2, true);
  }
  {  // srun --mpi=pmi2
    const Variables srun({{"PMI_RANK", "6"},
                          {"PMI_SIZE", "8"},
                          {"SLURM_PROCID", "6"},
                          {"SLURM_STEP_NUM_TASKS", "8"},
                          {"SLURM_LOCALID", "2"}});
    check(read_launch_env(), "PMI", 6, 8, 2, true);
  }
  {  // srun --mpi=pmix
    const Variables srun(
        {{"PMIX_RANK", "6"}, {"SLURM_PROCID", "6"}, {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_LOCALID", "2"}});
    check(read_launch_env(), "Slurm", 6, 8, 2, true);
  }
  {  // srun without MPI: ranks connect to MASTER_ADDR
    const Variables srun({{"SLURM_PROCID", "1"},
                          {"SLURM_STEP_NUM_TASKS", "2"},
                          {"SLURM_LOCALID", "1"},
                          {"MASTER_ADDR", "node1"},
                          {"MASTER_PORT", "4711"}});
    const LaunchEnv e = read_launch_env();
    check(e, "Slurm", 1, 2, 1, false);
    CHECK(e.master_host == "node1");
    CHECK(!e.port_taken);
  }
  {  // a batch script that does not call srun is one process, however many tasks its job has
    const Variables sbatch({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}});
    check(read_launch_env(), "", 0, 1, 0, false);
  }
}

TEST_CASE("dist: without MASTER_ADDR srun's ranks connect to the first host of their step", "[dist]") {
  const auto address = [](const Variables::Values& more) {
    Variables::Values all = {
        {"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_LOCALID", "0"}, {"SLURM_JOB_ID", "1234567"}};
    all.insert(all.end(), more.begin(), more.end());
    const Variables variables(all);
    const LaunchEnv e = read_launch_env();
    return fmt::format("{}:{}", e.master_host, e.master_port);
  };
  const std::pair<const char*, const char*> lists[] = {{"n[07-09,12],login", "n07"},
                                                       {"login,n[1-2]", "login"},
                                                       {"n1", "n1"},
                                                       {"a[1,2]b[3-4]", "a1b3"},
                                                       {"gpu-[003,5-7]-x", "gpu-003-x"}};
  for (const auto& [list, first] : lists)
    CHECK(address({{"SLURM_STEP_NODELIST", list}}) == fmt::format("{}:19567", first));
  CHECK(address({{"SLURM_STEP_NODELIST", "n1"}, {"SLURM_STEP_NUM_NODES", "1"}}) == "localhost:19567");
  CHECK(address({{"SLURM_STEP_NODELIST", "n[1-2]"}, {"MASTER_ADDR", "b"}, {"MASTER_PORT", "4711"}}) == "b:4711");
  CHECK(address({}) == ":0");
}

TEST_CASE("dist: the run id is torchrun's or Slurm's, and the secret is TRIAD_SECRET", "[dist]") {
  const auto expect = [](std::initializer_list<std::pair<const char*, const char*>> set, const std::string& id) {
    const Variables variables(set);
    CHECK(read_launch_env().run_id == id);
  };
  expect({}, "");
  expect({{"TORCHELASTIC_RUN_ID", "night"}, {"SLURM_JOB_ID", "42"}}, "night");
  expect({{"TORCHELASTIC_RUN_ID", "none"}}, "");
  expect({{"TORCHELASTIC_RUN_ID", "none"}, {"SLURM_JOB_ID", "42"}, {"SLURM_STEP_ID", "3"}}, "42");
  expect({{"SLURM_PROCID", "1"},
          {"SLURM_STEP_NUM_TASKS", "2"},
          {"SLURM_LOCALID", "1"},
          {"SLURM_JOB_ID", "42"},
          {"SLURM_STEP_ID", "3"}},
         "42.3");  // two steps in a Slurm job are two runs
  {
    const Variables secret({{"TRIAD_SECRET", "hush"}});
    CHECK(read_launch_env().secret == "hush");
  }
  const std::string long_id(300, 'x');
  const Variables too_long({{"TORCHELASTIC_RUN_ID", long_id.c_str()}});
  CHECK_THROWS_AS(read_launch_env(), UsageError);
}
