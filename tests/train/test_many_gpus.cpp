// Runs on four and eight GPUs, in every arrangement of shards, replicas and shared sequences: they have one rank's
// weights and the same bits twice, and a run whose rank was killed goes on in another arrangement. Whole runs, started
// through mpirun. The same checks run on eight CPU ranks.
#include <fmt/format.h>
#include <signal.h>

#include <string>
#include <vector>

#include "io/weight_index.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

struct Sharing {
  int ranks, context;
  const char* keys;
};

const std::vector<Sharing> kFour = {{4, 1, "--set dist.zero=3"},
                                    {4, 1, "--set dist.zero=3 --set dist.replicas=2"},
                                    {4, 4, "--set dist.zero=1"},
                                    {4, 2, "--set dist.zero=2"}};
const std::vector<Sharing> kEight = {{8, 1, "--set dist.zero=3"},
                                     {8, 1, "--set dist.zero=3 --set dist.replicas=2"},
                                     {8, 8, "--set dist.zero=0"},
                                     {8, 4, "--set dist.zero=3 --set runtime.recompute=block"},
                                     {8, 2, "--set dist.zero=2 --set dist.replicas=2"}};

std::string describe(const Sharing& s) {
  return fmt::format("{} ranks, dist.context {}, {}", s.ranks, s.context, s.keys);
}

// Steps with eight sequences of 50 tokens, which no rank count divides into equal parts with whole blocks.
std::string arguments(const std::string& out, const Sharing& s, const std::string& more) {
  return fmt::format(
      "{} --set model.dim=128 --set train.seq_len=50 --set train.eps=1e-4 --set train.min_lr_fraction=1 --set "
      "train.micro_batch_size={} --set dist.context={} {} {}",
      train_args(out), 8 * s.context / s.ranks, s.context, s.keys, more);
}

std::string train_arranged(const std::string& out, const Sharing& s, const std::string& more) {
  const std::string args = arguments(out, s, "--set train.steps=12 " + more);
  const Outcome outcome = s.ranks == 1 ? run_program(args) : run_ranks(s.ranks, args);
  INFO(describe(s) << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return out;
}

constexpr Sharing kAlone = {1, 1, ""};

double weights_distance(const std::string& a, const std::string& b) {
  return difference(tensors_path(a), tensors_path(b)).all;
}

void check_weights(const std::vector<Sharing>& arrangements, const std::string& more) {
  const TemporaryFolder folder;
  const std::string one = train_arranged(folder.file("one"), kAlone, more);
  for (size_t i = 0; i < arrangements.size(); ++i) {
    INFO(describe(arrangements[i]) << " " << more);
    const auto run = [&](const char* name) {
      return train_arranged(folder.file(fmt::format("{}{}", name, i)), arrangements[i], more);
    };
    const std::string first = run("first");
    CHECK(weights_distance(one, first) < 1e-6);
    CHECK(tensors(tensors_path(first)) == tensors(tensors_path(run("again"))));
  }
}

// Kills a rank in each arrangement, and resumes its checkpoint in the next one.
void check_kills(const std::vector<Sharing>& arrangements, const std::string& more) {
  const TemporaryFolder folder;
  const std::string one = train_arranged(folder.file("one"), kAlone, more);
  for (size_t i = 0; i < arrangements.size(); ++i) {
    const Sharing &killed = arrangements[i], &next = arrangements[(i + 1) % arrangements.size()];
    const std::string out = folder.file(fmt::format("killed{}", i)), log = out + ".log";
    BackgroundProgram program(
        arguments(out, killed,
                  "--set train.steps=1000000 --set train.allow_unsafe=true --set train.save_every=4 --set "
                  "train.keep_last=1000000 " +
                      more),
        mpirun(killed.ranks), log);
    wait_for_text(out + "/checkpoints/step_4/state.json", "step");
    const std::vector<int> pids = pids_of(out, killed.ranks, 3);
    kill(pids.back(), SIGKILL);
    CHECK(program.wait() != 0);
    CHECK(all_gone(pids));
    INFO(describe(killed) << ", then " << describe(next) << " " << more << "\n" << read_text(log));
    CHECK(has(read_text(log), fmt::format("rank {} (pid ", killed.ranks - 1)));
    const std::string resumed = train_arranged(folder.file(fmt::format("resumed{}", i)), next,
                                               more + " --resume " + out + "/checkpoints/step_4");
    CHECK(column(resumed + "/training.csv", "loss").begin()->first == 5);
    CHECK(weights_distance(one, resumed) < 1e-6);
  }
}

void check_gpus(const std::vector<Sharing>& arrangements) {
  const std::string gpu = "--set runtime.device=cuda ";
  for (const char* graph : {"", "--set runtime.cuda_graph=true"}) check_weights(arrangements, gpu + graph);
  check_kills(arrangements, gpu);
}

}  // namespace

TEST_CASE("dist: eight ranks have the weights of one, and a killed rank's run goes on in other arrangements",
          "[dist]") {
  if (!require_mpirun()) return;
  check_kills(kEight, "");
}

TEST_CASE("dist: four GPUs have the weights of one and the same bits twice, and go on in other arrangements",
          "[dist][gpu4]") {
  if (!require_gpus(4) || !require_mpirun()) return;
  check_gpus(kFour);
}

TEST_CASE("dist: eight GPUs have the weights of one and the same bits twice, and go on in other arrangements",
          "[dist][gpu8]") {
  if (!require_gpus(8) || !require_mpirun()) return;
  check_gpus(kEight);
}
