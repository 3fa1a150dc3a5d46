// Several ranks: how they are launched, and that they compute the same weights as one rank, with the same bits where
// these are guaranteed. Whole runs, started through mpirun or torchrun's variables.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "io/json_config.h"
#include "io/weight_index.h"
#include "tests/support/dist_run.h"
#include "tests/support/huggingface_folder.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

TEST_CASE("dist: 1, 2 and 4 ranks give the same weights, for any bucket size and sharding", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string one = run(folder.file("1"), 1), two = run(folder.file("2"), 2), four = run(folder.file("4"), 4);
  for (const std::string& ranks : {two, four}) {
    const Difference d = difference(one + kWeights, ranks + kWeights);
    CHECK(d.all < 1e-6);
    CHECK(d.worst < 1e-5);
  }
  int i = 0;
  for (const char* more : {"", "--set dist.bucket_mb=0.0009765625", "--set dist.bucket_mb=0.02",
                           "--set dist.bucket_mb=64", "--set dist.zero=1", "--set runtime.recompute=block"}) {
    INFO(more);
    CHECK(same_file(two + kWeights, run(folder.file("other" + std::to_string(i++)), 2, more) + kWeights));
  }
  CHECK(same_file(four + kWeights,
                  run(folder.file("four_zero"), 4, "--set dist.zero=1 --set dist.bucket_mb=0.02") + kWeights));
  const Difference half =
      difference(two + kWeights, run(folder.file("half"), 2, "--set dist.grad_dtype=bf16") + kWeights);
  CHECK(half.all > 0);
  CHECK(half.all < 1e-2);

  CHECK(lines(two + "/ddp_buckets.txt")
            .front()
            .starts_with("3 buckets, 4 collectives a step on 2 ranks: all_reduce f32"));
  CHECK(fs::exists(two + "/ranks/rank_1.log"));
  CHECK(Json::parse(lines(two + "/heartbeat_rank1.jsonl").back())["rank"] == 1);
  CHECK(Json::parse(read_text(two + "/env.json"))["ranks"].size() == 2);
  CHECK(lines(two + "/training.csv").size() == 21);
  CHECK(Json::parse(read_text(two + "/metrics.json"))["tokens"] ==
        Json::parse(read_text(one + "/metrics.json"))["tokens"]);
}

TEST_CASE("dist: biases and norms of q and k are summed over the ranks, for any bucket size and sharding", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string keys = "--set model.qkv_bias=true --set model.qk_norm=true ";
  const std::string one = run(folder.file("1"), 1, keys), two = run(folder.file("2"), 2, keys);
  CHECK(difference(one + kWeights, two + kWeights).all < 1e-6);
  const auto weights = tensors(two + kWeights);
  for (const char* name : {"q_proj.bias", "v_sel_proj.bias", "k_win_norm.weight"}) {
    const std::vector<float>& trained = weights.at(std::string("blocks.1.attn.") + name);
    CHECK(std::count(trained.begin(), trained.end(), trained[0]) < static_cast<std::ptrdiff_t>(trained.size()));
  }
  int i = 0;
  for (const char* more : {"--set dist.bucket_mb=0.0009765625", "--set dist.zero=1 --set dist.bucket_mb=0.02",
                           "--set runtime.recompute=block"}) {
    INFO(more);
    CHECK(same_file(two + kWeights, run(folder.file("other" + std::to_string(i++)), 2, keys + more) + kWeights));
  }
}

TEST_CASE("dist: a resume on another number of ranks has the same state and gives the same losses", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  for (const char* precision : {"fp32", "bf16"}) {
    const std::string more =
        std::string("--set train.save_every=10 --set train.eval_every=10 --set train.eval_batches=3 ") +
        "--set runtime.precision=" + precision + " ";
    const std::string whole = run(folder.file(std::string("whole_") + precision), 2, more);
    const std::string shards = run(folder.file(std::string("shards_") + precision), 2, more + "--set dist.zero=1");
    const std::string from = shards + "/checkpoints/step_10";
    const std::map<int, double> unbroken = column(whole + "/training.csv", "loss");
    for (const char* stem : {kWeightsStem, kMomentsStem})
      CHECK(tensors(tensors_path(whole + "/checkpoints/step_10", stem)) == tensors(tensors_path(from, stem)));
    for (const int ranks : {1, 2, 4}) {
      const std::string to = folder.file(precision + std::to_string(ranks));
      run(to, ranks, more + "--resume '" + from + "'" + (ranks == 4 ? " --set dist.zero=1" : ""));
      INFO(precision << " on " << ranks);
      // After loading, all ranks' weights and moments together are exactly the checkpoint's.
      for (const char* stem : {kWeightsStem, kMomentsStem})
        CHECK(tensors(tensors_path(from, stem)) == tensors(tensors_path(to + "/checkpoints/step_10", stem)));
      const Difference d = difference(whole + kWeights, to + kWeights);
      CHECK(d.all < (ranks == 2 ? 1e-30 : std::string(precision) == "fp32" ? 1e-6 : 1e-3));
      const std::map<int, double> resumed = column(to + "/training.csv", "loss");
      CHECK(resumed.size() == 10);
      for (const auto& [step, loss] : resumed) {
        INFO("step " << step);
        CHECK(step > 10);
        CHECK(std::abs(loss - unbroken.at(step)) < 1e-4);
      }
      const auto validation = [](const std::string& run) { return column(run + "/val.csv", "val_loss").at(20); };
      CHECK(std::abs(validation(to) - validation(whole)) < 1e-4);
    }
  }
}

static void check_gpus_against_one(int ranks) {
  if (!require_gpus(ranks) || !require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string gpu = "--set runtime.device=cuda ";
  const std::string one = run(folder.file("1"), 1, gpu), all = run(folder.file("all"), ranks, gpu);
  const Difference d = difference(one + kWeights, all + kWeights);
  CHECK(d.all < 1e-6);
  CHECK(d.worst < 1e-5);
  // NCCL chooses the order in which it adds more than two values, and the order may depend on a bucket's size.
  const bool same_order = ranks == 2 || read_text(all + "/ddp_buckets.txt").find(",copies,") != std::string::npos;
  int i = 0;
  for (const char* more :
       {"", "--set dist.bucket_mb=0.0009765625", "--set dist.bucket_mb=64", "--set dist.zero=1",
        "--set dist.backend=mpi", "--set runtime.cuda_graph=true", "--set dist.zero=1 --set runtime.cuda_graph=true",
        "--set dist.zero=1 --set dist.bucket_mb=0.0009765625"}) {
    INFO(more);
    const std::string other = run(folder.file("other" + std::to_string(i++)), ranks, gpu + more) + kWeights;
    if (same_order)
      CHECK(same_file(all + kWeights, other));
    else
      CHECK(difference(all + kWeights, other).all < 1e-6);
  }
}

TEST_CASE("dist: two GPUs give the weights of one, with NCCL and with MPI the same bits", "[dist][gpu2]") {
  check_gpus_against_one(2);
}

TEST_CASE("dist: four GPUs give the weights of one, with NCCL and with MPI the same bits", "[dist][gpu4]") {
  check_gpus_against_one(4);
}

TEST_CASE("dist: if GPUs do not copy to each other, the log gives the reason", "[dist][gpu2]") {
  if (!require_gpus(2) || !require_mpirun()) return;
  const TemporaryFolder folder;
  const auto log_gives_reason = [&](const std::string& name, const std::string& environment) {
    const Outcome outcome =
        run_command(environment + mpirun(2) + TRIAD_PROGRAM " train " + kTiny +
                    " --verbose --set train.steps=2 --set runtime.device=cuda --set log.out_dir=" + folder.file(name));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return outcome.output.find("not by copies between the GPUs: rank 0: NCCL_P2P_DISABLE is set") != std::string::npos;
  };
  CHECK(log_gives_reason("disabled", "NCCL_P2P_DISABLE=1 "));
  CHECK_FALSE(log_gives_reason("usual", ""));
}

TEST_CASE("dist: ranks with different configs do not start", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string args = train_args(folder.file("run"));
  const Outcome outcome = run_command(mpirun(2) + "sh -c 'exec " TRIAD_PROGRAM " " + args +
                                      "--set train.lr=$((OMPI_COMM_WORLD_RANK + 1))e-3'");
  INFO(outcome.output);
  CHECK(outcome.exit_code != 0);
  CHECK(outcome.output.find("the config of rank 1 differs from rank 0's: train.lr 0.001 -> 0.002") !=
        std::string::npos);
  CHECK(!fs::exists(folder.file("run") + "/training.csv"));
  const auto refused = [&](const std::string& environment, const std::string& words) {
    const Outcome o = run_program(args, environment);
    INFO(environment << "\n" << o.output);
    CHECK(o.exit_code == 2);
    CHECK(o.output.find(words) != std::string::npos);
  };
  refused("RANK=3 WORLD_SIZE=2 LOCAL_RANK=0", "RANK is 3, but WORLD_SIZE is 2");
  refused("RANK=x WORLD_SIZE=2 LOCAL_RANK=0", "RANK is \"x\"");
  refused("RANK=0 WORLD_SIZE=2", "LOCAL_RANK is not set");
  refused("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "MASTER_ADDR:MASTER_PORT");
  refused("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=1",
          "MPI_LOCALRANKID is 1, but MPI_LOCALNRANKS is 1");
}

TEST_CASE("dist: ranks that read different weights or data do not start, and the folder is unchanged",
          "[dist][waits]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), own = "--set train.save_every=2 --set train.steps=2 ";
  REQUIRE(run_program(train_args(out, own)).exit_code == 0);
  for (const char* rank : {"0", "1"}) {  // each rank has its own working directory with a run and a text file
    const std::string here = folder.file(rank);
    REQUIRE(run_program(train_args(here + "/first", own + "--set data.seed=1 --set train.seed=" + rank)).exit_code ==
            0);
    write_text(here + "/text.txt", std::string(rank[0] == '0' ? 4000 : 5000, 'x'));
    write_text(here + "/same_size.txt", std::string(3999, 'x') + rank);
    Json tokenizer = parse_json(bpe_tokenizer_json(), "a tokenizer");
    if (rank[0] == '1') std::swap(tokenizer["model"]["vocab"]["a"], tokenizer["model"]["vocab"]["b"]);
    write_text(here + "/tokenizer.json", tokenizer.dump());
  }
  const auto refused = [&](const std::string& more, const std::string& words) {
    const Outcome outcome = run_command(mpirun(2) + "sh -c 'cd " + folder.path() + "/$OMPI_COMM_WORLD_RANK; exec " +
                                        TRIAD_PROGRAM " " + train_args(out, more) + "'");
    INFO(outcome.output);
    CHECK(outcome.exit_code != 0);
    CHECK(outcome.output.find(words) != std::string::npos);
    CHECK(fs::exists(out + "/checkpoints/step_2" + kWeights));
    CHECK(fs::exists(out + kWeights));
  };
  refused("--overwrite --set train.init_from=first", "the weights to begin with have checksum");
  refused("--overwrite --set data.kind=text --set data.paths=text.txt --set data.val_fraction=0",
          "the tokens to train on are 4001 on rank 0, but 5001 on rank 1");
  refused("--overwrite --set data.kind=text --set data.paths=same_size.txt --set data.val_fraction=0",
          "the checksum of the tokens to train on is ");
  // The text has neither token that the tokenizers number differently.
  refused(fmt::format("--overwrite --set data.kind=text --set data.paths=../0/text.txt --set data.val_fraction=0 --set "
                      "data.tokenizer=tokenizer.json --set model.vocab_size={}",
                      kBpeTokens),
          "the tokenizer is tokenizer.json of ");
}

TEST_CASE("dist: a step's time for computing does not include waiting for other ranks", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  // Each matrix product on rank 1 takes 20 ms longer, so that rank 0 waits for rank 1 at every bucket.
  const Outcome outcome = run_command(with_faults("TRIAD_FAULTS='1 0.02'") + mpirun(2) + TRIAD_PROGRAM " " +
                                      train_args(out, "--set dist.bucket_mb=0.02 --set train.steps=4"));
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  double wait_ms = 0, compute_ms = 0, step_ms = 0, parts_ms = 0;
  for (const std::string& line : lines(out + "/heartbeat_rank0.jsonl")) {
    const Json beat = Json::parse(line);
    if (beat["msg"] != "step_end") continue;
    wait_ms += beat["comm_wait_ms"].get<double>(), compute_ms += beat["compute_ms"].get<double>();
    step_ms += beat["step_ms"].get<double>();
    for (const char* part : {"compute_ms", "comm_wait_ms", "update_ms"}) parts_ms += beat[part].get<double>();
  }
  CHECK(wait_ms > 0.3 * step_ms);
  CHECK(compute_ms < 0.7 * step_ms);
  CHECK(parts_ms <= 1.01 * step_ms);
  // So few steps are all in the mean.
  const Json metrics = Json::parse(read_text(out + "/metrics.json"));
  CHECK(metrics["comm_wait_ms"].get<double>() == Approx(wait_ms / 4));
}

TEST_CASE("dist: environment variables set bucket size, timeout and backend", "[dist]") {
  const TemporaryFolder folder;
  const Outcome outcome = run_program(train_args(folder.file("run"), "--set train.steps=1"),
                                      "NSA_DDP_BUCKET_MB=3.5 NSA_PG_TIMEOUT_MIN=0.5 TORCH_BACKEND=gloo");
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const Json dist = Json::parse(read_text(folder.file("run") + "/config.json"))["dist"];
  CHECK(dist["bucket_mb"] == 3.5);
  CHECK(dist["timeout_s"] == 30);
  CHECK(dist["backend"] == "mpi");
  for (const char* bad : {"NSA_DDP_BUCKET_MB=0", "NSA_PG_TIMEOUT_MIN=long", "TORCH_BACKEND=smoke"})
    CHECK(run_program(train_args(folder.file("run")), bad).exit_code == 2);
}

namespace {
// Two ranks that do not find each other end before the test's limit does it, and print why.
const std::string kTwoRanks = "--set train.accumulate_grad_batches=2 --set dist.timeout_s=200";
}  // namespace

TEST_CASE("dist: ranks with plain srun's variables connect at MASTER_ADDR, and log who they are", "[dist]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), args = train_args(out, kTwoRanks);
  const auto launch = [&](int rank, int local) {
    return fmt::format(
        "export SLURM_PROCID={} SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID={} MASTER_ADDR=127.0.0.1 OMP_NUM_THREADS=1 "
        "MASTER_PORT={}; exec ",
        rank, local, reserved_port());
  };
  {
    BackgroundProgram other(args, launch(1, 1)), first(args, launch(0, 0), folder.file("log"));
    CHECK(first.wait() == 0);
    CHECK(other.wait() == 0);
    const std::string log = read_text(folder.file("log"));
    INFO(log);
    CHECK(log.find("2 ranks on 1 host, host memory over TCP") != std::string::npos);
    for (const char* rank : {"rank 0  host ", "rank 1  host ", "local rank 1  pid "})
      CHECK(read_text(out + "/ranks/rank_0.log").find(rank) != std::string::npos);
  }
  // Two ranks with the same host and local rank would use the same GPU.
  BackgroundProgram other(args + " --overwrite", launch(1, 0)),
      first(args + " --overwrite", launch(0, 0), folder.file("log"));
  CHECK(first.wait() != 0);
  CHECK(other.wait() != 0);
  CHECK(read_text(folder.file("log")).find("both have local rank 0") != std::string::npos);
}

TEST_CASE("dist: a host whose ranks are not adjacent is refused by name", "[dist]") {
  for (const bool adjacent : {true, false}) {
    const TemporaryFolder folder;
    const std::string args = train_args(folder.file("run"), kTwoRanks + " --set train.steps=1");
    std::vector<std::unique_ptr<BackgroundProgram>> ranks;
    for (int rank = 0; rank < 4; ++rank) {
      const auto [host, local] = adjacent ? std::pair{rank / 2, rank % 2} : std::pair{rank % 2, rank / 2};
      ranks.push_back(std::make_unique<BackgroundProgram>(
          args, as_torchrun_would(rank) + fmt::format("export WORLD_SIZE=4 LOCAL_RANK={}; exec env ", local) +
                    with_faults("TRIAD_HOST=" + std::string(1, "ab"[host]))));
    }
    for (const auto& rank : ranks) {
      const int code = rank->wait();
      const std::string log = read_text(rank->output_file());
      INFO(log);
      CHECK((code == 0) == adjacent);
      if (!adjacent)
        CHECK(has(log, "ranks 0 and 2 are on host a, and rank 1 between them is on host b: a host's ranks must be"));
    }
    if (adjacent) CHECK(has(read_text(ranks[0]->output_file()), "4 ranks on 2 hosts"));
  }
}

TEST_CASE("dist: ranks with torchrun's variables need no MPI", "[dist]") {
  const TemporaryFolder folder;
  const auto launch = [&](int rank) {
    return "export RANK=" + std::to_string(rank) + " LOCAL_RANK=" + std::to_string(rank) +
           " WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost OMP_NUM_THREADS=1 TORCHELASTIC_USE_AGENT_STORE=True "
           "MASTER_PORT=" +
           std::to_string(reserved_port()) + "; exec ";
  };
  const std::string two = folder.file("two"), args = train_args(two, kTwoRanks);
  BackgroundProgram other(args, launch(1)), first(args, launch(0));
  for (BackgroundProgram* rank : {&first, &other}) {
    const int code = rank->wait();
    INFO(read_text(rank->output_file()));
    CHECK(code == 0);
  }
  const Difference d = difference(run(folder.file("one"), 1) + kWeights, two + kWeights);
  CHECK(d.all < 1e-6);
}
