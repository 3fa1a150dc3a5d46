// dist.context: runs whose ranks share sequences end with one rank's weights, also with dist.zero, replicas and
// recomputation, and resume on other rank counts. Whole runs, started through mpirun. Also: which sequence rows each
// rank in a group has and needs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/with_cuda.h"
#include "io/weight_index.h"
#include "kernels/nsa/compress.h"
#include "model/sequence/layout.h"
#include "tests/support/dist_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;

namespace {

// 12 steps with four 50-token sequences, which no rank count divides into equal parts with whole blocks. Returns the
// run's folder.
std::string train_shared(const std::string& out, int ranks, int context, int accumulated, const std::string& more) {
  const int groups = ranks / context;
  const std::string args = fmt::format(
      "{} --set train.steps=12 --set train.seq_len=50 --set train.eps=1e-4 --set runtime.asserts=true --set "
      "dist.context={} --set train.micro_batch_size={} --set train.accumulate_grad_batches={} {}",
      train_args(out), context, 4 / groups / accumulated, accumulated, more);
  const Outcome outcome = ranks == 1 ? run_program(args) : run_ranks(ranks, args);
  INFO(ranks << " ranks: triad " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return out;
}

// |a - b| / |a| over all final weights.
double shared_distance(const std::string& a, const std::string& b) {
  const auto x = tensors(tensors_path(a)), y = tensors(tensors_path(b));
  double error = 0, size = 0;
  for (const auto& [name, values] : x)
    for (size_t i = 0; i < values.size(); ++i) {
      error += std::pow(double{values[i]} - y.at(name).at(i), 2);
      size += std::pow(double{values[i]}, 2);
    }
  REQUIRE(size > 0);
  return std::sqrt(error / size);
}

}  // namespace

TEST_CASE("context: 12 steps have the weights of one rank, with every dist.zero, replicas and recomputation",
          "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string eval = "--set train.eval_every=6 --set train.eval_batches=3 ";
  const std::string one = train_shared(folder.file("one"), 1, 1, 1, eval);
  const auto near = [&](const std::string& name, int ranks, int context, int accumulated, const std::string& keys) {
    const std::string run = train_shared(folder.file(name), ranks, context, accumulated, keys);
    INFO(name);
    CHECK(shared_distance(one, run) < 1e-6);
    return run;
  };
  const std::string two = near("two", 2, 2, 1, eval);
  const auto losses = [](const std::string& run) { return column(run + "/val.csv", "val_loss"); };
  REQUIRE(losses(one).size() == 2);
  for (const auto& [step, loss] : losses(two)) CHECK(loss == Approx(losses(one).at(step)).epsilon(1e-6));
  near("replicas", 4, 2, 2, "--set dist.zero=2");
  near("shards", 4, 4, 1, "--set dist.zero=3 --set runtime.recompute=block");
  CHECK(same_file(two + kWeights, train_shared(folder.file("again"), 2, 2, 1, eval) + kWeights));
}

TEST_CASE("context: tokens share lists on their rank, and documents that would part them are refused", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string shared = "--set nsa.selector=index --set nsa.d_index=8 --set nsa.select_every=4 ";
  const std::string one = train_shared(folder.file("one"), 1, 1, 1, shared);
  CHECK(shared_distance(one, train_shared(folder.file("two"), 2, 2, 1, shared)) < 1e-6);
  CHECK(shared_distance(
            one, train_shared(folder.file("all"), 1, 1, 1, "--set nsa.selector=index --set nsa.d_index=8 ")) > 1e-3);
  write_text(folder.file("text.jsonl"), "{\"text\": \"one of two texts\"}\n{\"text\": \"the other one\"}\n");
  const Outcome refused = run_ranks(2, train_args(folder.file("refused")) +
                                           " --set dist.context=2 --set data.kind=text --set model.vocab_size=257 "
                                           "--set train.seq_len=8 --set data.paths=" +
                                           folder.file("text.jsonl") + " " + shared);
  INFO(refused.output);
  CHECK(refused.exit_code == 2);
  CHECK(has(refused.output, "dist.context is 2: with nsa.select_every 4 tokens share lists"));
}

TEST_CASE("context: a graph on two GPUs has the bits of two GPUs without one, and needs NCCL", "[dist][gpu2]") {
  if (!require_gpus(2) || !require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string gpu =
                        "--set runtime.device=cuda --set runtime.asserts=false --set train.eval_every=6 "
                        "--set log.heartbeat_every=1 ",
                    graph = gpu + "--set runtime.cuda_graph=true ";
  int runs = 0;
  // With one sequence, and with four, which are staged, with graphs for the first, later and last micro-steps.
  for (const int accumulated : {1, 4})
    for (const char* keys : {"", "--set dist.zero=1 --set runtime.recompute=block"}) {
      INFO(accumulated << " micro-steps " << keys);
      const auto run = [&](const std::string& more) {
        return train_shared(folder.file(std::to_string(runs++)), 2, 2, accumulated, more + keys);
      };
      const std::string without = run(gpu), with = run(graph);
      CHECK(same_file(without + kWeights, with + kWeights));
      const auto collectives = [](const std::string& of) {
        return heartbeats(of, 0, "step_end").back()["collectives"].get<int64_t>();
      };
      CHECK(collectives(with) < collectives(without));  // a graph's exchanges are one
    }
  const Outcome refused =
      run_ranks(2, train_args(folder.file("mpi")) + " --set dist.context=2 --set dist.backend=mpi " + graph);
  CHECK(refused.exit_code != 0);
  CHECK(has(refused.output, "dist.context is 2: with runtime.cuda_graph the ranks must be connected by NCCL"));
}

TEST_CASE("context: documents stay apart across cuts, and a resume takes another number of ranks", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 400; ++i)
    text += fmt::format("{{\"text\": \"line {} of a text{}\"}}\n", i, std::string(i % 37, 'x'));
  write_text(folder.file("text.jsonl"), text);
  const std::string data =
      "--set data.kind=text --set model.vocab_size=257 --set data.documents=attend_within "
      "--set data.paths=" +
      folder.file("text.jsonl") + " ";
  const std::string one = train_shared(folder.file("one"), 1, 1, 1, data),
                    two =
                        train_shared(folder.file("two"), 2, 2, 1, data + "--set train.save_every=6 --set dist.zero=1");
  CHECK(shared_distance(one, two) < 1e-6);
  CHECK(shared_distance(
            one, train_shared(folder.file("four"), 4, 4, 1, data + "--resume " + two + "/checkpoints/step_6")) < 1e-6);
}

TEST_CASE("context: ranges of rows cover a sequence once, and hold what each rank's tokens see", "[dist]") {
  for (const int64_t T : {5, 48, 61})
    for (const int64_t ranks : {2, 4}) {
      const SequenceLayout layout = SequenceLayout::of(T, ranks, 0);
      INFO(T << " tokens on " << ranks << " ranks");
      CHECK(layout.tokens() >= T);
      CHECK(layout.tokens() < T + 2 * ranks);
      const auto covers_once = [](const RowLists& lists, int64_t all) {
        RowList ranges;
        for (const RowList& list : lists) ranges.insert(ranges.end(), list.begin(), list.end());
        std::sort(ranges.begin(), ranges.end(), [](const RowRange& a, const RowRange& b) {
          return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
        });
        int64_t next = 0;
        for (const RowRange& r : ranges) {
          CHECK(r.begin == next);
          next = r.end;
        }
        CHECK(next == all);
      };
      covers_once(layout.tokens_by_rank(), layout.tokens());
      for (const auto& [l, d] : {std::pair<int64_t, int64_t>{8, 4}, {24, 12}, {1, 1}}) {
        const RowLists blocks = layout.blocks(l, d), edges = layout.block_tokens(l, d);
        covers_once(blocks, compressed_length(layout.tokens(), l, d));
        for (size_t r = 0; r < blocks.size(); ++r)
          for (size_t i = 0; i < 2; ++i) {
            const RowRange block = blocks[r][i], edge = edges[r][i];
            CHECK(compressed_length(edge.size(), l, d) == block.size());
            if (block.size() > 0) CHECK(edge.begin == block.begin * d);
            if (block.size() > 0) CHECK(edge.end >= (block.end - 1) * d + l);
          }
      }
      for (int64_t r = 0; r < ranks; ++r)
        for (int64_t i = 0; i < 2; ++i) {
          const RowRange run = layout.chunk_of(r, i);
          CHECK(layout.windows(7)[static_cast<size_t>(r)][static_cast<size_t>(i)] ==
                RowRange{std::max<int64_t>(0, run.begin - 6), run.end});
        }
      // All ranks see equally many token pairs in causal attention.
      const auto pairs = [&](int64_t r) { return layout.chunk_of(r, 0).begin + layout.chunk_of(r, 1).begin; };
      for (int64_t r = 0; r < ranks; ++r) CHECK(pairs(r) == pairs(0));
    }
}

TEST_CASE("context: a batch is cut into runs, and its documents are extended with their sequence", "[dist]") {
  const std::vector<int32_t> batch = {0, 1, 2, 3, 4, 10, 11, 12, 13, 14};
  const SequenceLayout first = SequenceLayout::of(5, 2, 4), second = SequenceLayout::of(5, 2, 5);
  CHECK(first.cut(batch, 2, -1) == std::vector<int32_t>{0, 1, -1, -1, 10, 11, -1, -1});
  CHECK(second.cut(batch, 2, -1) == std::vector<int32_t>{2, 3, 4, -1, 12, 13, 14, -1});
  CHECK(first.extend(std::vector<int32_t>{0, 2, 5, 9, 10}, 2) == std::vector<int32_t>{0, 2, 8, 12, 16});
  const RowPart part = second.row_part();
  CHECK(part.token(1) == 3);
  CHECK(part.token(2) == 4);
  CHECK(part.token(3) == 5);
  CHECK(first.row_part().token(2) == 6);
}

TEST_CASE("context: a plan has the memory of every rank of a group", "[dist][build]") {
  // In a CUDA build the plan is for a GPU, whose block-list index grows with the tokens before a run's end.
  const Device device = backend::built_with_cuda() ? Device::cuda() : Device::cpu();
  struct Case {
    const char* config;
    std::vector<std::string> sets;
    int64_t documents;
  };
  // In the last case the middle rank (of three) needs the most, since its runs round up the most.
  for (const auto& [file, sets, documents] :
       {Case{"tiny.json", {"train.seq_len=8192", "model.n_kv_groups=4", "nsa.n_sel=16", "dist.context=4"}, 0},
        Case{"tiny.json",
             {"train.seq_len=8192", R"(nsa.layers=[{"layers":"0:1","branches":"win","w":5000}])", "dist.context=4"},
             4},
        Case{"m7c_125m.json",
             {"train.seq_len=864", "model.n_layers=1", "model.dim=16", "model.vocab_size=64", "dist.context=3"},
             4}}) {
    std::vector<std::string> all = sets;
    all.insert(all.end(), {"train.micro_batch_size=1", "model.mlp_hidden=16"});
    const Config config = load_config(std::string(TRIAD_SOURCE_DIR "/configs/") + file, all).config;
    const int64_t ranks = config.dist.context;
    const std::unique_ptr<Comm> comm = make_planned_comm(static_cast<int>(ranks));
    const MemoryPlan plan = plan_memory(config, device, comm.get(), documents);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Runtime runtime({.device = device, .planning = true});
      TrainStep step(runtime, config, comm.get(), documents, rank);
      step.micro_step({}, {}, 1);
      step.finish(0, 1);
      step.evaluate({}, {});
      INFO(file << ", rank " << rank);
      CHECK(runtime.scratch().peak_bytes() <= plan.scratch_bytes);
      CHECK(runtime.arena().used_bytes() + align_up(plan.scratch_bytes) == plan.arena_bytes);
    }
  }
}

TEST_CASE("context: long runs have the scratch memory of their backward one after the other", "[dist][build]") {
  if (!backend::built_with_cuda()) return void(skip("built without CUDA"));
  const std::unique_ptr<Comm> comm = make_planned_comm(2);
  const auto scratch = [&](int64_t seq_len) {
    const Config config = load_config(TRIAD_SOURCE_DIR "/configs/m7c_1m.json",
                                      {"dist.context=2", "model.n_layers=1", fmt::format("train.seq_len={}", seq_len)})
                              .config;
    return plan_memory(config, Device::cuda(), comm.get(), /*most_documents=*/0).scratch_bytes;
  };
  // Spans with 65,280 tokens, whose two backwards run concurrently, and with 65,536.
  CHECK(scratch(262144) < 0.95 * static_cast<double>(scratch(261120)));
}
