// The communication trace: one row per bucket and step, gradient sums that differ between ranks, and the last
// collectives' list if one doesn't finish.
#include <algorithm>
#include <map>
#include <sstream>

#include "io/checkpoint.h"
#include "kernels/step/checksum.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/monitor/bucket_trace.h"

using namespace triad;
using namespace triad::test;

namespace {

const std::string kTrace = "--set 'log.diagnostics=[\"buckets\"]' ";

std::string bucket_args(const std::string& out, const std::string& more) {
  return "train " + kTiny + " --set runtime.device=cpu --set dist.bucket_mb=0.05 --set log.out_dir=" + out + " " + more;
}

std::vector<std::string> fields(const std::string& line) {
  std::vector<std::string> out;
  std::istringstream in(line);
  for (std::string field; std::getline(in, field, ',');) out.push_back(field);
  return out;
}

// Returns the trace's rows, below its header, as a map from (step, bucket) to the fields.
std::map<std::pair<int, int>, std::vector<std::string>> rows(const std::string& path) {
  const std::string text = read_text(path);
  const size_t at = text.find(BucketTrace::kHeader);
  REQUIRE(at != std::string::npos);
  std::istringstream in(text.substr(at + std::string(BucketTrace::kHeader).size()));
  std::map<std::pair<int, int>, std::vector<std::string>> out;
  for (std::string line; std::getline(in, line);) {
    const std::vector<std::string> f = fields(line);
    REQUIRE(f.size() == 6);
    out[{std::stoi(f[0]), std::stoi(f[1])}] = f;
  }
  return out;
}

}  // namespace

TEST_CASE("buckets: a checksum depends on every bit and its position", "[dist]") {
  const std::unique_ptr<Runtime> runtime = std::make_unique<Runtime>(
      Runtime::Options{.device = Device::cpu(), .arena_bytes = 1 << 20, .scratch_bytes = 1 << 10});
  const Tensor x = runtime->arena().alloc(MemTag::io, "x", DType::f32, {1000}),
               out = runtime->arena().alloc(MemTag::io, "out", DType::i64, {1});
  auto* words = reinterpret_cast<uint32_t*>(x.data);
  for (uint32_t i = 0; i < 1000; ++i) words[i] = i * 2654435761u;
  const auto sum = [&] {
    checksum(runtime->ctx(), out, x);
    return *out.ptr<int64_t>();
  };
  const int64_t before = sum();
  uint64_t expected = 0;
  for (uint64_t i = 0; i < 1000; ++i) expected += words[i] * ((i * 0x9E3779B97F4A7C15u) | 1u);
  CHECK(static_cast<uint64_t>(before) == expected);
  for (const int i : {0, 1, 500, 999})
    for (int bit = 0; bit < 32; ++bit) {
      words[i] ^= 1u << bit;
      CHECK(sum() != before);
      words[i] ^= 1u << bit;
    }
  std::swap(words[3], words[4]);
  CHECK(sum() != before);
}

TEST_CASE("buckets: the rank that differs from the majority is named; of two ranks, both are", "[dist]") {
  CHECK(odd_ranks({5, 5, 5}).empty());
  CHECK(odd_ranks({5}).empty());
  CHECK(odd_ranks({5, 7, 5}) == "rank 1 has 0000000000000007, the others 0000000000000005");
  CHECK(odd_ranks({1, 7, 1, 1, 9}) ==
        "rank 1 has 0000000000000007, rank 4 has 0000000000000009, the others 0000000000000001");
  CHECK(odd_ranks({5, 7}) == "rank 0 has 0000000000000005, rank 1 has 0000000000000007");
}

TEST_CASE("buckets: a row for each bucket and step on every rank, and unchanged weights", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const auto train = [&](const std::string& name, const std::string& more, const std::string& environment = "") {
    const Outcome outcome =
        run_command(environment + mpirun(2) + TRIAD_PROGRAM " " + bucket_args(folder.file(name), more));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return folder.file(name);
  };
  const std::string plain = train("plain", ""), traced = train("traced", kTrace);
  CHECK(read_text(plain + "/model.safetensors") == read_text(traced + "/model.safetensors"));
  CHECK_FALSE(has(read_text(plain + "/ddp_buckets.txt"), BucketTrace::kHeader));
  const auto first = rows(traced + "/ddp_buckets.txt"), second = rows(traced + "/ddp_buckets_rank1.txt");
  const int buckets = static_cast<int>(first.size()) / 20;
  CHECK(buckets > 2);
  REQUIRE(first.size() == static_cast<size_t>(20 * buckets));
  REQUIRE(second.size() == first.size());
  std::map<std::string, int> checksums;
  for (const auto& [key, row] : first) {
    CHECK(row[2] == second.at(key)[2]);
    CHECK(row[5] == second.at(key)[5]);
    CHECK(std::stod(row[3]) > 0);
    CHECK(std::stod(row[4]) > std::stod(row[3]));
    ++checksums[row[5]];
  }
  CHECK(checksums.size() == first.size());
  // With sharding a rank has only its own bucket part. Parts differ between ranks, so nothing is compared.
  const std::string shards = train("shards", "--set dist.zero=1", "NSA_TRACE_DDP_BUCKETS=1 ");
  const auto own = rows(shards + "/ddp_buckets.txt"), other = rows(shards + "/ddp_buckets_rank1.txt");
  CHECK(own.at({3, 0})[5] != other.at({3, 0})[5]);
}

TEST_CASE("buckets: a rank whose bucket differs is named, and the run ends", "[dist][waits]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const auto flipped = [&](const std::string& name, const std::string& more) {
    return run_command(with_faults("TRIAD_FLIP='1 7' TRIAD_SLOW_SYNC=0.1") + mpirun(3) + TRIAD_PROGRAM " " +
                       bucket_args(folder.file(name), more));
  };
  const Outcome found = flipped("traced", kTrace + "--set train.save_every=1");
  INFO(found.output);
  CHECK(found.exit_code == 1);
  CHECK(has(found.output, "the ranks' sums of gradients differ: bucket "));
  CHECK(has(found.output, ": rank 1 has "));
  CHECK(has(found.output, ", the others "));
  CHECK(has(read_text(folder.file("traced") + "/heartbeat_rank2.jsonl"), "\"divergence\""));
  // The run ends after the previous step's checkpoint, which was still being written.
  const int64_t saved = list_checkpoints(folder.file("traced/checkpoints")).back().step;
  CHECK(has(found.output, "step " + std::to_string(saved + 1) + ": the ranks' sums"));
  CHECK(flipped("plain", "").exit_code == 0);  // no check finds the flipped bit without the trace
}

TEST_CASE("buckets: one passes between replicas while the next is summed within them", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const Outcome outcome = run_ranks(
      4, bucket_args(out, kTrace + "--set train.steps=2 --set train.accumulate_grad_batches=1 --set dist.replicas=2"));
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  std::vector<std::pair<double, double>> begun_complete;  // when each bucket's sum begins, and when it is complete
  for (const auto& [at, row] : rows(out + "/ddp_buckets.txt"))
    if (at.first == 2) begun_complete.emplace_back(std::stod(row.at(3)), std::stod(row.at(4)));
  REQUIRE(begun_complete.size() > 3);
  std::sort(begun_complete.begin(), begun_complete.end());
  // By the order in which a rank queues: the next bucket's sum begins before a bucket is complete.
  for (size_t i = 1; i < begun_complete.size(); ++i) CHECK(begun_complete[i].first < begun_complete[i - 1].second);
}

TEST_CASE("buckets: the last collectives are written if one does not finish", "[dist][waits]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log"), asleep = folder.file("asleep");
  BackgroundProgram program(bucket_args(out,
                                        "--set train.steps=1000000 --set train.allow_unsafe=true --set log.every=1000 "
                                        "--set dist.timeout_s=8"),
                            with_faults("TRIAD_FAULTS='1 300 " + asleep + "'") + mpirun(2), log);
  wait_for_text(out + "/heartbeat_rank0.jsonl", "step_end");
  write_text(asleep, "");
  CHECK(program.wait() == 1);
  INFO(read_text(log));
  std::istringstream in(read_text(out + "/ranks/rank_0_collectives.csv"));
  std::vector<std::string> all;
  for (std::string line; std::getline(in, line);) all.push_back(line);
  REQUIRE(all.size() > 13);
  CHECK(has(all[0], "was not finished within dist.timeout_s = 8 s"));
  CHECK(all[2] == "number,what,bytes,began_s,finished_s");
  CHECK(all.size() <= 1003);
  const std::vector<std::string> last = fields(all.back()), before = fields(all[all.size() - 2]);
  CHECK(has(last.at(1), "all_reduce of bucket"));
  CHECK(last.size() == 4);  // a collective that has not finished has no finish time
  CHECK(before.size() == 5);
  CHECK(std::stoll(last[0]) == std::stoll(before[0]) + 1);
  CHECK(std::stod(before[4]) >= std::stod(before[3]));
}
