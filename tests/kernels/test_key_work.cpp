// Work pieces in the selected branch's backward: how they're cut (plan_pieces), and the bounds on pieces and slots. For
// random documents and lists, a plan made by the inverse index's rules stays within the bounds, and some plans reach
// them.
#include <algorithm>
#include <numeric>
#include <vector>

#include "engine/rng.h"
#include "kernels/common/documents.h"
#include "kernels/nsa/dispatch/plan_pieces.h"
#include "kernels/nsa/gpu/key_work_bounds.h"
#include "tests/support/test.h"

using namespace triad;
using cuda::Backward;
using cuda::key_work_bounds;
using cuda::KeyWorkBounds;
using cuda::KeyWorkShape;
using cuda::ListedWork;
using cuda::PiecePlan;

namespace {

// A row with documents of these lengths and its tokens' lists. most: largest document count per row.
struct Row {
  std::vector<int64_t> lengths;
  int64_t l_sel = 0, n = 0, most = 0;

  int64_t T() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }
  int64_t ids() const { return block_ids(T(), l_sel, most); }
  KeyWorkShape shape() const { return {T(), n, std::min(l_sel, T()), ids()}; }
};

// Calls visit(token, document's first block, token's block) for each token.
template <class Visit>
void for_each_token(const Row& row, Visit&& visit) {
  int64_t begin = 0, document = 0;
  for (const int64_t length : row.lengths) {
    const int64_t first = begin / row.l_sel + document++;
    for (int64_t t = begin; t < begin + length; ++t) visit(t, first, first + (t - begin) / row.l_sel);
    begin += length;
  }
}

// The pieces and slots that index_plan_kernel plans. chooses(token, block): whether the token's list has the block.
// Tokens before `first` have no list.
template <class Chooses>
KeyWorkBounds planned(const Row& row, const PiecePlan& plan, Chooses&& chooses, int64_t first = 0) {
  const int64_t run_tokens = ceil_div(row.T() - first, plan.parts) * plan.cut, runs = plan.parts / plan.cut;
  std::vector<std::vector<int64_t>> counts(static_cast<size_t>(row.ids()),
                                           std::vector<int64_t>(static_cast<size_t>(runs), 0));
  for_each_token(row, [&](int64_t t, int64_t first_block, int64_t own) {
    int64_t listed = 0;
    for (int64_t block = own; t >= first && block >= first_block && listed < row.n; --block)
      if (chooses(t, block)) ++counts[block][(t - first) / run_tokens], ++listed;
  });
  KeyWorkBounds sum{0, 0};
  for (const std::vector<int64_t>& block_counts : counts) {
    int64_t pieces = 0;
    for (const int64_t tokens : block_counts) pieces += ceil_div(tokens, plan.most_tokens);
    sum.pieces += std::max<int64_t>(1, pieces);
    if (pieces > 1) sum.slots += pieces;
  }
  return sum;
}

// A part of a row: queries that see all blocks of 64 keys up to the part's end, with lists of 16 blocks.
ListedWork part_of_row(int64_t queries, int64_t blocks, int64_t Hq, int64_t Hkv, int64_t width) {
  return {.B = 1,
          .T = queries,
          .Hq = Hq,
          .Hkv = Hkv,
          .dk = width,
          .dv = width,
          .n = 16,
          .blocks = blocks,
          .block_keys = 64,
          .is_part = true,
          .has_documents = false};
}
// The plan as {parts, cut, most_tokens, merges}.
std::vector<int64_t> plan_of(const ListedWork& work, Backward kernels) {
  const PiecePlan plan = plan_pieces(work, kernels);
  return {plan.parts, plan.cut, plan.most_tokens, plan.merges};
}

constexpr auto kAll = [](int64_t, int64_t) { return true; };

Row random_row(const Philox& random, uint64_t& drawn) {
  const auto below = [&](int64_t end) {
    return static_cast<int64_t>(random.below(drawn++, static_cast<uint64_t>(end)));
  };
  Row row;
  row.l_sel = int64_t{1} << below(5);
  row.n = 1 + below(12);
  const int64_t documents = 1 + below(40), longest = 1 + (below(3) == 0 ? below(900) : below(40));
  for (int64_t i = 0; i < documents; ++i) row.lengths.push_back(1 + below(longest));
  if (below(3) == 0) row.lengths[static_cast<size_t>(below(documents))] += 600;  // one long document beside short ones
  row.most = documents + below(4) * below(20);
  return row;
}

}  // namespace

TEST_CASE("key work: no documents and lists need more pieces or slots than the bounds", "[documents]") {
  const Philox random(21, 0);
  uint64_t drawn = 0;
  for (int round = 0; round < 3000; ++round) {
    const Row row = random_row(random, drawn);
    const int64_t parts = int64_t{1} << random.below(drawn++, 6);
    const int64_t cut = std::max<int64_t>(1, parts >> random.below(drawn++, 6));
    const PiecePlan plan{parts, cut, 1 + static_cast<int64_t>(random.below(drawn++, 60))};
    const uint64_t often = 1 + random.below(drawn++, 4);  // one in so many visible blocks is listed
    // In half the rounds only the last tokens have lists, as in a part of a row (RowPart).
    const auto first =
        random.below(drawn++, 2) == 0 ? 0 : static_cast<int64_t>(random.below(drawn++, static_cast<uint64_t>(row.T())));
    const auto chooses = [&](int64_t t, int64_t block) {
      const auto round_bits = static_cast<uint64_t>(round) << 40;
      return random.below(round_bits + static_cast<uint64_t>(t * 4096 + block), often) == 0;
    };
    KeyWorkShape shape = row.shape();
    shape.queries = row.T() - first;
    const KeyWorkBounds bounds = key_work_bounds(shape, plan), need = planned(row, plan, chooses, first);
    INFO("round " << round << ": T " << row.T() << ", lists from token " << first << " on, " << row.lengths.size()
                  << " of " << row.most << " documents, l_sel " << row.l_sel << ", n " << row.n << ", plan " << parts
                  << "/" << cut << "/" << plan.most_tokens);
    CHECK(need.pieces <= bounds.pieces);
    CHECK(need.slots <= bounds.slots);
  }
}

TEST_CASE("key work: a row of one document reaches the bounds up to its full pieces", "[documents]") {
  // Every token lists all earlier blocks, and no piece is full.
  const Row row{.lengths = {512}, .l_sel = 16, .n = 32, .most = 1};
  const PiecePlan plan{8, 2, 1000};
  const int64_t full = 512 * 32 / 1000;
  const KeyWorkBounds bounds = key_work_bounds(row.shape(), plan), need = planned(row, plan, kAll);
  CHECK(need.pieces == 8 + 16 + 24 + 32);  // the blocks that begin before each run ends
  CHECK(bounds.pieces == full + need.pieces);
  CHECK(need.slots == need.pieces - 8);  // the last run's own blocks have one piece each
  CHECK(bounds.slots <= full + need.pieces);
  // A single run needs slots only for blocks with a full piece.
  CHECK(key_work_bounds(row.shape(), {8, 8, 1000}).slots == full + std::min<int64_t>(full, 32));
}

TEST_CASE("key work: a document that reaches the bounds beside many short ones", "[documents]") {
  Row row{.lengths = std::vector<int64_t>(100, 1), .l_sel = 16, .n = 40, .most = 101};
  row.lengths.push_back(412);
  const PiecePlan plan{4, 1, 1000};
  const int64_t full = 512 * 40 / 1000;
  const KeyWorkBounds bounds = key_work_bounds(row.shape(), plan), need = planned(row, plan, kAll);
  // Ids without a block have a piece too. Alone, the bound on further pieces counts the tokens before the document.
  CHECK(need.pieces == row.ids() + 2 + 10 + 18);
  CHECK(bounds.pieces == full + row.ids() + 8 + 16 + 24);
}

TEST_CASE("key work: many short documents add little", "[documents]") {
  // 65,536 tokens in 64-key blocks, 16 blocks per list, as cut for 64-wide heads and 6-head groups: 8 runs.
  const PiecePlan plan{8, 1, 512};
  const auto slots = [&](int64_t documents) {
    return key_work_bounds({65536, 16, 64, block_ids(65536, 64, documents)}, plan).slots;
  };
  CHECK(slots(1) == 2048 + 128 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8));
  CHECK(slots(5000) <= slots(1) + 2048 + 7);
}

TEST_CASE("key work: runs of whole rows fit into L2, and short rows are one run", "[documents]") {
  const auto row = [](int64_t T) {
    ListedWork work = part_of_row(T, T / 64, 12, 2, 64);
    work.is_part = false;
    return work;
  };
  CHECK(plan_of(row(2048), Backward::sm90_d64) == std::vector<int64_t>{8, 8, 1536, 0});
  CHECK(plan_of(row(2048), Backward::sm90_d128) == std::vector<int64_t>{8, 8, 1024, 0});
  CHECK(plan_of(row(16384), Backward::sm90_d64) == std::vector<int64_t>{8, 8, 1536, 0});
  CHECK(plan_of(row(16385), Backward::sm90_d64) == std::vector<int64_t>{8, 4, 512, 0});
  CHECK(plan_of(row(65536), Backward::sm90_d64) == std::vector<int64_t>{8, 2, 512, 0});
  CHECK(plan_of(row(262144), Backward::sm90_d64) == std::vector<int64_t>{16, 1, 512, 0});
  CHECK(plan_of(row(1 << 23), Backward::sm90_d64) == std::vector<int64_t>{32, 1, 512, 0});
  // The portable kernel holds kDqWorkTokens tokens per list in shared memory.
  CHECK(plan_of(row(2048), Backward::portable_dq_dk_dv) == std::vector<int64_t>{8, 8, 512, 0});
  CHECK(plan_of(row(65536), Backward::portable_dq_dk_dv) == std::vector<int64_t>{8, 2, 512, 0});
  // Kernels that do not compute dq have one run, and packed rows at most four.
  for (const Backward kernels : {Backward::sm90, Backward::portable})
    CHECK(plan_of(row(1 << 23), kernels) == std::vector<int64_t>{8, 8, 2048, 0});
  ListedWork packed = row(1 << 23);
  packed.has_documents = true;
  CHECK(plan_of(packed, Backward::sm90_d64) == std::vector<int64_t>{8, 2, 1536, 1});
  CHECK(plan_of(packed, Backward::sm90_d128) == std::vector<int64_t>{8, 2, 1024, 0});
  CHECK(plan_of(packed, Backward::portable_dq_dk_dv) == std::vector<int64_t>{8, 2, 512, 0});
}

TEST_CASE("key work: runs of parts of rows are joined until their partial sums are few", "[documents]") {
  // M7C with 2,097,152 tokens on two ranks: 32 runs would have 8 queries per block. Joined to 16 runs, they have 16
  // queries per block, and 32 GiB partial sums.
  const ListedWork m7c = part_of_row(524288, 32768, 12, 2, 64);
  CHECK(plan_of(m7c, Backward::sm90_d64) == std::vector<int64_t>{16, 1, 512, 0});
  // 1x1,048,576x64x4x128 on two ranks: 16 runs would have 16 queries per block, but 64 GiB.
  CHECK(plan_of(part_of_row(262144, 16384, 64, 4, 128), Backward::sm90_d128) == std::vector<int64_t>{8, 1, 512, 0});
  // A row's last part on many ranks: two runs have 16 queries per block. Four would have 8 GiB, but 8 queries.
  CHECK(plan_of(part_of_row(65536, 32768, 12, 2, 64), Backward::sm90_d64) == std::vector<int64_t>{8, 4, 512, 0});
  CHECK(plan_of(part_of_row(65536, 65536 * 2, 12, 2, 64), Backward::sm90_d64) == std::vector<int64_t>{8, 8, 1536, 0});
  // A batch with such parts has as many partial sums for each sequence, and longer lists have more queries per block.
  ListedWork batch = m7c, longer = m7c;
  batch.B = 2, longer.n = 32;
  CHECK(plan_of(batch, Backward::sm90_d64) == std::vector<int64_t>{8, 1, 512, 0});
  CHECK(plan_of(longer, Backward::sm90_d64) == std::vector<int64_t>{16, 1, 512, 0});
  longer.block_keys = 32;
  CHECK(plan_of(longer, Backward::sm90_d64) == std::vector<int64_t>{32, 1, 512, 0});
  // The whole row at these sizes keeps its 32 runs.
  ListedWork whole = m7c;
  whole.is_part = false;
  CHECK(plan_of(whole, Backward::sm90_d64) == std::vector<int64_t>{32, 1, 512, 0});
}
