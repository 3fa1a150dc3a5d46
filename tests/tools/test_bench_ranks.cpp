// triad bench on several ranks: exchanges between ranks that share sequences, counted here token by token and compared
// with triad plan's; their attention, compared with one process; wrong rank counts and options.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"
#include "train/fit/step_cost.h"

using namespace triad;
using namespace triad::test;

namespace {

// Rows that a rank sends to and receives from others.
struct Moved {
  int64_t sent = 0, received = 0;
  friend bool operator==(const Moved&, const Moved&) = default;
};
using MovedRows = std::map<std::string, std::vector<Moved>>;  // kind -> entries by rank

// Rows in one layer's forward. T: tokens per sequence, which the spans divide.
class Count {
 public:
  Count(int64_t T, int ranks, int64_t l, int64_t d, int64_t w) : ranks_(ranks), run_(T / (2 * ranks)) {
    for (int rank = 0; rank < ranks; ++rank)
      for (const int64_t run : {int64_t{rank}, int64_t{2 * ranks - 1 - rank}}) {
        const int64_t begin = run * run_, end = begin + run_;
        // One range serves both spans, up to the second's end; then one range per span.
        if (run >= ranks) add("sel", rank, 0, end);
        add("win", rank, std::max<int64_t>(0, begin - w + 1), end);
        int64_t first = -1, last = -1;
        for (int64_t block = 0; block * d + l <= T; ++block)
          if (block * d >= begin && block * d < end) first = first < 0 ? block : first, last = block;
        if (first >= 0) add("cmp, not yet compressed", rank, first * d, std::min(T, last * d + l + d - 1));
      }
    for (int rank = 0; rank < ranks; ++rank)
      for (int64_t block = 0; block * d + l <= T; ++block) add_row("cmp", rank, owner(block * d));
  }
  MovedRows rows() const { return rows_; }

 private:
  int owner(int64_t token) const {
    const auto run = static_cast<int>(token / run_);
    return std::min(run, 2 * ranks_ - 1 - run);
  }
  void add_row(const std::string& kind, int rank, int from) {
    std::vector<Moved>& moved = rows_[kind];
    moved.resize(static_cast<size_t>(ranks_));
    if (from == rank) return;
    ++moved[static_cast<size_t>(from)].sent;
    ++moved[static_cast<size_t>(rank)].received;
  }
  void add(const std::string& kind, int rank, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) add_row(kind, rank, owner(token));
  }

  int ranks_;
  int64_t run_;
  MovedRows rows_;
};

// Bytes in an exchange list, by kind and pass.
std::map<std::string, std::vector<Moved>> bytes_of(const Json& exchanges) {
  MovedRows all;
  for (const Json& e : exchanges)
    for (const Json& rank : e["ranks"])
      all[e["kind"].get<std::string>() + " " + e["pass"].get<std::string>()].push_back(
          {rank["sent"].get<int64_t>(), rank["received"].get<int64_t>()});
  return all;
}

// The JSON object in a program's output.
Json json_line(const Outcome& outcome) {
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return parse_json(outcome.standard_output, "the output");
}

}  // namespace

TEST_CASE("bench: steps of ranks that share sequences list what each rank exchanges, as a plan does", "[bench]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string config =
      kTiny +
      " --json --set runtime.device=cpu --set dist.context=2 --set dist.zero=1 --set runtime.recompute=block --set "
      "train.accumulate_grad_batches=3 ";
  const Json out = json_line(
                 run_ranks(2, "bench step " + config + "--steps 2 --warm-up 0 --append " + folder.file("kept.jsonl"))),
             row = out["results"][0];
  CHECK(row["case"] == "tiny 2x48 nsa x3 on 2 ranks, context 2, zero 1");
  CHECK(row["tokens_per_s"].get<double>() == Approx(2 * 3 * 48 / row["us"].get<double>() * 1e6));
  CHECK(lines(folder.file("kept.jsonl")).size() == 2);  // rank 0 alone writes: the ceiling and the step
  CHECK(row["links_gb_per_s"].get<double>() > 0);

  // Two sequences, two groups, keys and values 8 wide in f32; two layers, three micro-steps.
  constexpr int64_t kRowBytes = 2 * 2 * (8 + 8) * 4, kTimes = 2 * 3;
  MovedRows expected;
  for (const auto& [kind, rows] : Count(48, 2, 8, 4, 16).rows())
    for (const Moved& r : rows) {
      const Moved once = {r.sent * kRowBytes * kTimes, r.received * kRowBytes * kTimes};
      expected["keys and values of " + kind + " forward"].push_back(once);
      // The first layer's recomputation gathers them as forward does (the last layer needs none), and both layers'
      // backward gathers all but the compressed blocks again.
      const int64_t times = kind == "cmp" ? 1 : 3;
      expected["keys and values of " + kind + " backward"].push_back(
          {times * once.sent / 2, times * once.received / 2});
      expected["gradients of " + kind + " backward"].push_back({once.received, once.sent});
    }
  CHECK(bytes_of(row["exchanges"]) == expected);
  for (const Json& e : row["exchanges"])
    for (const Json& rank : e["ranks"]) CHECK(rank["exposed_us"].get<double>() > 0);

  const Json plan = json_line(run_program("plan " + config + "--ranks 2"))["context"];
  CHECK(bytes_of(plan["exchanges"]) == expected);
  double most = 0;
  for (const auto& [kind, ranks] : expected) {
    int64_t kind_most = 0;
    for (const Moved& m : ranks) kind_most = std::max({kind_most, m.sent, m.received});
    most += static_cast<double>(kind_most);
  }
  CHECK(plan["step_bytes"].get<double>() == Approx(most));
  CHECK(plan["step_seconds"]["exchange"].get<double>() == Approx(most / kH200Rates.host));
  CHECK(plan["tokens_per_s"].get<double>() < plan["tokens_per_s_overlapped"].get<double>());
}

TEST_CASE("bench: steps of several ranks list each rank's exposed exchange", "[bench]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  // Matrix products on rank 1 take longer, so that rank 0 waits for it at every bucket: a second altogether, which a
  // busy machine does not add to rank 0.
  const Outcome outcome = run_command(with_faults("TRIAD_FAULTS='1 0.03'") + mpirun(2) + TRIAD_PROGRAM " bench step " +
                                      kTiny + " --set runtime.device=cpu --set dist.bucket_mb=0.02 --steps 1 " +
                                      "--warm-up 0 --append " + folder.file("rows.jsonl"));
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const Json ranks = Json::parse(lines(folder.file("rows.jsonl")).back())["by_rank"];
  REQUIRE(ranks.size() == 2);
  const auto us = [&](size_t rank, const char* part) { return ranks[rank][part].get<double>(); };
  CHECK(us(0, "exposed_us") > us(0, "compute_us"));
  CHECK(us(1, "exposed_us") < us(1, "compute_us"));
  CHECK(us(0, "update_us") > 0);
  CHECK(!ranks[0].contains("joules"));  // a CPU reports none
  CHECK(has(outcome.output, "exposed exchange ms"));
  CHECK(has(outcome.output, "\nrank 1 "));
  CHECK(has(outcome.output, " not known\n"));
}

TEST_CASE("bench: the attention of ranks that share a sequence is compared with one process's", "[bench]") {
  if (!require_mpirun()) return;
  // Each rank writes to stderr too, as Open MPI 5 does.
  const Json rows = json_line(
      run_command(mpirun(2) + "sh -c 'echo btl_tcp: noise >&2; exec " TRIAD_PROGRAM
                              " bench attention --context 2 --device cpu --json --shapes 1x40x4x2x8 --l 8 --d 4 "
                              "--l-sel 8 --w 16'"))["results"];
  REQUIRE(rows.size() == 2);
  for (const Json& row : rows) {
    CHECK(row["op"] == "attention");
    CHECK(row["case"] == "1x40x4x2x8 randn l8 d4 l'8 n16 w16 context 2");
    CHECK(row["ranks"] == 2);
    CHECK(row["us"].get<double>() > 0);
    CHECK(row["ideal_us"].get<double>() > 0);
  }
  CHECK(rows[0]["pass"] == "forward");
  CHECK(rows[1]["pass"] == "backward");
  constexpr int64_t kRowBytes = 2 * (8 + 8) * 4;
  const auto bytes = bytes_of(rows[1]["exchanges"]);
  for (const auto& [kind, ranks] : Count(40, 2, 8, 4, 16).rows())
    for (size_t r = 0; r < 2; ++r)
      CHECK(bytes.at("keys and values of " + kind + " forward").at(r) ==
            Moved{ranks[r].sent * kRowBytes, ranks[r].received * kRowBytes});
}

TEST_CASE("bench: wrong numbers of ranks and options that do not go with several are refused", "[bench]") {
  const auto refused = [](const std::string& args, const std::vector<std::string>& words) {
    const Outcome outcome = run_program("bench " + args);
    INFO(args << "\n" << outcome.output);
    CHECK(outcome.exit_code == 2);
    for (const std::string& word : words) CHECK(outcome.output.find(word) != std::string::npos);
  };
  refused("step " + kTiny + " --set runtime.device=cpu --set dist.context=2",
          {"dist.context is 2", "number of ranks, which is 1"});
  const std::string attention = "attention --device cpu --shapes 1x40x4x2x8 ";
  refused(attention + "--context 2", {"--context is 2", "number of ranks is 1", "mpirun -np 2"});
  refused(attention + "--context 2 --documents 4x10", {"--context is 2", "4x10"});
  refused(attention + "--context 2 --data runs/mine", {"--context is 2", "runs/mine"});
  refused(attention + "--context 41", {"--context is 41", "1x40x4x2x8 has 40 tokens"});
  refused(attention + "--context 0", {"--context"});
}
