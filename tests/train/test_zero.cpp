// dist.zero 0 to 3, train.grads_dtype and runtime.offload: which runs give the same bits, and how close the others are
// to a one-rank run. Whole runs, started through mpirun.
#include <fmt/format.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "io/weight_index.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// The largest distance between runs whose gradients are rounded to bf16. Measured on CPUs: 3.4e-4 to 6e-4.
constexpr double kMostBf16 = 1e-3;

// A run's final weights, in one file or several.
std::map<std::string, std::vector<float>> weights_of(const std::string& run) { return tensors(tensors_path(run)); }

// |a - b| / |a| over all weights.
double distance(const std::map<std::string, std::vector<float>>& a,
                const std::map<std::string, std::vector<float>>& b) {
  double error = 0, size = 0;
  for (const auto& [name, values] : a)
    for (size_t i = 0; i < values.size(); ++i) {
      error += std::pow(double{values[i]} - b.at(name).at(i), 2);
      size += std::pow(double{values[i]}, 2);
    }
  return std::sqrt(error / size);
}

// Trains configs/tiny.json, but four times as wide, so that every rank has a part of each layer, with 12 sequences per
// step over all ranks, in this many micro-steps.
std::string train_arguments(const std::string& out, int ranks, int accumulated, const std::string& more) {
  return fmt::format(
      "{} --set model.dim=128 --set train.micro_batch_size={} --set train.accumulate_grad_batches={} --set "
      "train.eps=1e-4 {}",
      train_args(out), 12 / ranks / accumulated, accumulated, more);
}
std::string train_zero(const std::string& out, int ranks, int accumulated, const std::string& more) {
  const std::string args = train_arguments(out, ranks, accumulated, more);
  const Outcome outcome = ranks == 1 ? run_program(args) : run_ranks(ranks, args);
  INFO(ranks << " ranks: triad " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return out;
}

// Checks bits with dist.zero 0 to 3 and these keys, and the distance to one rank's weights.
void check_stages(int ranks, int accumulated, const std::string& more, double most) {
  const TemporaryFolder folder;
  const auto one = weights_of(train_zero(folder.file("one"), 1, 1, more));
  std::vector<std::map<std::string, std::vector<float>>> by_zero;
  for (int zero = 0; zero < 4; ++zero)
    by_zero.push_back(
        weights_of(train_zero(folder.file(std::to_string(zero)), ranks, accumulated,
                              fmt::format("--set dist.bucket_mb=0.1 --set dist.zero={} {}", zero, more))));
  INFO(ranks << " ranks, " << accumulated << " micro-steps " << more);
  CHECK(by_zero[0] == by_zero[1]);
  CHECK(by_zero[2] == by_zero[3]);
  // Zero 2 and 3 add over the ranks first, then over the micro-steps.
  if (accumulated == 1) CHECK(by_zero[0] == by_zero[2]);
  for (const auto& weights : by_zero) CHECK(distance(one, weights) < most);
}

void check_all(const std::string& more) {
  check_stages(2, 1, more, 1e-6);
  check_stages(2, 3, more, 1e-6);
  check_stages(4, 1, more, 1e-6);
  check_stages(4, 3, more, 1e-6);
}

}  // namespace

TEST_CASE("zero: every stage gives the weights of one rank, and the same bits where sums have the same order",
          "[dist]") {
  if (!require_mpirun()) return;
  check_all("");
}

TEST_CASE("zero: tied embeddings, mixed layers and recomputation pass through the windows too", "[dist]") {
  if (!require_mpirun()) return;
  check_stages(2, 3, "--set model.tie_embeddings=true", 1e-6);
  check_stages(2, 1,
               "--set model.dense_layers=0:1 --set runtime.recompute=block --set nsa.phi=mlp --set model.qk_norm=true",
               1e-6);
}

TEST_CASE("zero: replicas of the shards give the weights of one rank", "[dist]") {
  if (!require_mpirun()) return;
  check_stages(4, 1, "--set dist.replicas=2", 1e-6);
  check_stages(4, 3, "--set dist.replicas=2 --set train.save_every=10", 1e-6);
  const TemporaryFolder folder;
  const std::string keys = "--set dist.zero=2 --set dist.replicas=2 ";
  const auto by_mpi = weights_of(train_zero(folder.file("mpi"), 4, 1, keys));
  // If each rank is a replica, sums are those without replicas.
  CHECK(weights_of(train_zero(folder.file("apart"), 2, 1, "--set dist.replicas=2 --set dist.zero=3")) ==
        weights_of(train_zero(folder.file("none"), 2, 1, "")));
  // Rank groups without MPI.
  const std::string tcp = folder.file("tcp");
  const Outcome started = run_command(
      fmt::format("export WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 OMP_NUM_THREADS=1 MASTER_PORT={}; "
                  "for r in 0 1 2 3; do RANK=$r LOCAL_RANK=$r timeout 100 " TRIAD_PROGRAM " {} & done; wait",
                  reserved_port(), train_arguments(tcp, 4, 1, keys)));
  INFO(started.output);
  CHECK(weights_of(tcp) == by_mpi);
  const Outcome uneven = run_ranks(3, train_arguments(folder.file("uneven"), 3, 1, keys));
  CHECK(uneven.exit_code != 0);
  CHECK(has(uneven.output, "dist.replicas is 2, but the run has 3 ranks"));
}

TEST_CASE("zero: between replicas gradients are in bf16 if dist.replicas_grad_dtype says so", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  int runs = 0;
  const auto weights = [&](const std::string& keys, int ranks = 4) {
    return weights_of(train_zero(folder.file(std::to_string(runs++)), ranks, 1,
                                 "--set dist.bucket_mb=0.1 --set train.steps=8 " + keys));
  };
  const std::string two = "--set dist.replicas=2 ", between = "--set dist.replicas_grad_dtype=bf16 ";
  // A run with this trace fails if replicas do not round alike.
  const auto exact = weights(two), half = weights(two + between + "--set 'log.diagnostics=[\"buckets\"]' ");
  CHECK(half == weights(two + between + "--set dist.zero=2"));
  CHECK(distance(exact, half) > 0);
  CHECK(distance(exact, half) < kMostBf16);
  CHECK(half != weights(two + "--set dist.grad_dtype=bf16"));  // which rounds within a replica, and not between them
  // If each rank is a replica, all sums pass between replicas.
  CHECK(weights(two + between, 2) == weights(two + "--set dist.grad_dtype=bf16", 2));
  const Outcome refused = run_program(train_arguments(folder.file("one"), 1, 1, between));
  CHECK(refused.exit_code == 2);
  CHECK(has(refused.output, "dist.replicas_grad_dtype is bf16, and dist.replicas is 1"));
}

TEST_CASE("zero: evaluations have the loss of one rank, if some ranks have a batch less", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  for (const char* batches : {"1", "3"}) {
    INFO(batches << " batches");
    const std::string more = fmt::format("--set train.eval_every=10 --set train.eval_batches={} ", batches);
    const auto losses = [&](const std::string& name, int ranks, const std::string& keys) {
      return column(train_zero(folder.file(name + batches), ranks, 12 / ranks, more + keys) + "/val.csv", "val_loss");
    };
    const std::map<int, double> one = losses("one", 1, "");
    CHECK(one.size() == 2);
    for (const auto& [step, loss] : losses("shards", 2, "--set dist.zero=3"))
      CHECK(loss == Approx(one.at(step)).epsilon(1e-6));
  }
}

TEST_CASE("zero: gradients sent or stored in bf16 give the same bits in every stage", "[dist]") {
  if (!require_mpirun()) return;
  check_stages(2, 1, "--set runtime.precision=bf16 --set dist.grad_dtype=bf16", kMostBf16);
  check_stages(2, 1, "--set runtime.precision=bf16 --set train.grads_dtype=bf16", kMostBf16);
  check_stages(2, 3, "--set runtime.precision=bf16 --set train.grads_dtype=bf16", kMostBf16);
}

TEST_CASE("zero: every stage on two GPUs, with the same bits where sums have the same order", "[dist][gpu2]") {
  if (!require_gpus(2) || !require_mpirun()) return;
  check_stages(2, 1, "--set runtime.device=cuda", 1e-6);
  check_stages(2, 3, "--set runtime.device=cuda", 1e-6);
  check_stages(2, 1, "--set runtime.device=cuda --set runtime.precision=bf16 --set runtime.recompute=block",
               2 * kMostBf16);
  check_stages(2, 3, "--set runtime.device=cuda --set runtime.precision=bf16 --set train.grads_dtype=bf16",
               2 * kMostBf16);
}

TEST_CASE("offload: an optimizer's state on the host gives the bits of one on the device", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  int number = 0;
  const auto check = [&](int ranks, const std::string& more) {
    INFO(ranks << " ranks " << more);
    const std::string a = train_zero(folder.file(std::to_string(number++)), ranks, 1, more),
                      b = train_zero(folder.file(std::to_string(number++)), ranks, 1,
                                     more + " --set runtime.offload=optimizer --set train.save_every=10");
    CHECK(weights_of(a) == weights_of(b));
    const std::string c = train_zero(folder.file(std::to_string(number++)), ranks, 1,
                                     more + " --set runtime.offload=optimizer --resume " + b + "/checkpoints/step_10");
    CHECK(weights_of(a) == weights_of(c));
  };
  check(1, "");
  check(1, "--set runtime.precision=bf16");
  check(1, "--set runtime.precision=bf16 --set train.master_dtype=none --set train.moments_dtype=bf16");
  for (const char* zero : {"1", "3"}) check(2, std::string("--set runtime.precision=bf16 --set dist.zero=") + zero);
}

TEST_CASE("offload: an optimizer's state on the host gives the bits of one on the GPU", "[train][gpu]") {
  if (!require_gpu()) return;
  const TemporaryFolder folder;
  const std::string more = "--set runtime.device=cuda --set runtime.precision=bf16 ";
  CHECK(weights_of(train_zero(folder.file("device"), 1, 3, more)) ==
        weights_of(train_zero(folder.file("host"), 1, 3, more + "--set runtime.offload=optimizer")));
}
