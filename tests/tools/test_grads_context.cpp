// mpirun -np N triad grads --context N: every tensor equals one process's, wherever the ranks' cuts fall.
#include <map>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "tests/support/dist_run.h"
#include "tests/support/grads_run.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

struct Problem {
  const char* name;
  int ranks;
  int64_t batch, seq;
  std::string keys;             // config keys
  std::vector<int32_t> bounds;  // document bounds; empty: one document
};

std::string command(const TemporaryFolder& folder, const Problem& p, const std::string& out) {
  return "grads --device cpu --dtype f64 --checkpoint " + folder.file("run") + " --tokens " +
         folder.file("tokens.bin") + " --batch " + std::to_string(p.batch) + " --seq " + std::to_string(p.seq) +
         (p.bounds.empty() ? "" : " --documents " + folder.file("bounds.i32")) + " --out " + out;
}

// Compares all tensors on p.ranks ranks with one process's.
void check_problem(const Problem& p) {
  INFO(p.name << ": " << p.ranks << " ranks, " << p.batch << " x " << p.seq << " tokens " << p.keys);
  const TemporaryFolder folder;
  // Freshly initialized gates have no gradient in their first matrix.
  const Outcome trained = run_program(
      train_args(folder.file("run"), "--set train.steps=2 --set train.lr=0.02 --set train.warmup_steps=0 " + p.keys));
  INFO(trained.output);
  REQUIRE(trained.exit_code == 0);
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < p.batch * (p.seq + 1); ++i) tokens.push_back((i * i + 3 * i + i / 7 + 5) % 256);
  write_shard(folder.file("tokens.bin"), tokens);
  write_bounds(folder.file("bounds.i32"), p.bounds);
  const Outcome one = run_program(command(folder, p, folder.file("one.safetensors")));
  INFO(one.output);
  REQUIRE(one.exit_code == 0);
  const Outcome many =
      run_ranks(p.ranks, command(folder, p, folder.file("many.safetensors")) + " --context " + std::to_string(p.ranks));
  INFO(many.output);
  REQUIRE(many.exit_code == 0);
  const std::map<std::string, GradsEntry> expected = read_grads(folder.file("one.safetensors")),
                                          got = read_grads(folder.file("many.safetensors"));
  REQUIRE(expected.size() == got.size());
  REQUIRE(expected.size() > 15);
  for (const auto& [name, entry] : expected) {
    INFO(name);
    CHECK(got.at(name).shape == entry.shape);
    CHECK(got.at(name).ids == entry.ids);
    const double norm = norm_of_difference(entry.floats, std::vector<double>(entry.floats.size()));
    if (name != "loss" && !entry.floats.empty()) CHECK(norm > 0);
    CHECK(norm_of_difference(entry.floats, got.at(name).floats) <= 1e-9 * norm);
  }
}

}  // namespace

TEST_CASE("context: ranks that share a sequence compute what one process does", "[dist]") {
  if (!require_mpirun()) return;
  const Problem problems[] = {
      {"a length that no rank divides", 2, 2, 47, "", {}},
      {"documents across cuts, one of a single token", 4, 1, 61, "", {0, 5, 6, 30, 47, 61}},
      {"blocks and windows longer than a run",
       4,
       2,
       61,
       "--set nsa.w=40 --set nsa.l=24 --set nsa.l_sel=24 --set nsa.d=12",
       {}},
      {"learned compression, documents", 4, 1, 61, "--set nsa.phi=mlp --set nsa.w=100", {0, 14, 17, 61}},
      {"shared keys and values, weights per position",
       3,
       1,
       50,
       "--set nsa.phi=conv --set nsa.shared_kv=true",
       {0, 20, 21, 50}},
      {"dense and NSA layers, learned compression, norms and biases of q and k",
       2,
       2,
       50,
       "--set nsa.phi=mlp --set model.dense_layers=0:1 --set model.qk_norm=true --set model.qkv_bias=true",
       {}},
      {"other strides, a window alone and one softmax in some layers, two without rotation, documents",
       4,
       1,
       61,
       "--set model.n_layers=4 --set model.nope_layers=1:3 --set nsa.phi=conv --set "
       "'nsa.layers=[{\"layers\":\"0:1\",\"branches\":\"win\",\"w\":20},"
       "{\"layers\":\"2:3\",\"branches\":\"sel\",\"selector\":\"index\",\"d_index\":6,\"l_sel\":4},"
       "{\"layers\":\"3:4\",\"l\":4,\"d\":2,\"n_sel\":6,\"w\":3}]'",
       {0, 14, 17, 61}},
      {"a window alone, longer than a run", 2, 2, 47, "--set nsa.branches=win --set nsa.w=30", {}},
      {"runs of padding alone", 4, 1, 17, "", {}}};
  for (const Problem& p : problems) check_problem(p);
}

TEST_CASE("context: numbers of ranks that do not fit are refused with their values", "[dist]") {
  const TemporaryFolder folder;
  const Problem p{"", 2, 1, 48, "", {}};
  const auto refused = [&](const std::string& args, const std::vector<std::string>& words) {
    const Outcome outcome = run_program(args);
    INFO(args << "\n" << outcome.output);
    CHECK(outcome.exit_code == 2);
    for (const std::string& word : words) CHECK(has(outcome.output, word));
  };
  refused(command(folder, p, folder.file("out")) + " --context 2", {"--context is 2", "number of ranks is 1"});
  refused(command(folder, p, folder.file("out")) + " --context 49", {"--context is 49", "--seq is 48"});
  const std::string train = "train " + kTiny + " --set runtime.device=cpu --set log.out_dir=" + folder.file("run");
  refused(train + " --set dist.context=2", {"dist.context is 2", "number of ranks, which is 1"});
  refused(train + " --set dist.context=0", {"dist.context"});
  refused(train + " --set dist.context=49", {"dist.context is 49", "train.seq_len is 48"});
}

TEST_CASE("context: a plan counts the tokens of groups of ranks, and each rank's memory", "[dist]") {
  const auto plan = [](const std::string& keys) {
    const Outcome outcome = run_program("plan " + kTiny + " --json --ranks 4 --set runtime.device=cpu " + keys);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return Json::parse(outcome.standard_output);
  };
  const std::string longer = "--set train.seq_len=4096 ";
  const Json alone = plan(longer), shared = plan(longer + "--set dist.context=2");
  CHECK(alone["tokens_per_step"] == 4 * 2 * 4096);
  CHECK(shared["tokens_per_step"] == 2 * 2 * 4096);
  CHECK(shared["flops_per_token"] == alone["flops_per_token"]);
  CHECK(shared["peak_bytes"].get<double>() < 0.75 * alone["peak_bytes"].get<double>());
  const Outcome refused = run_program("plan " + kTiny + " --ranks 3 --set dist.context=2");
  CHECK(refused.exit_code == 2);
  CHECK(has(refused.output, "dist.context is 2"));
}
