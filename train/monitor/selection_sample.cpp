#include "train/monitor/selection_sample.h"

#include <algorithm>
#include <iterator>

#include "kernels/common/integer.h"

namespace triad {

namespace {

constexpr int kSchema = 2;
// Limits on a sample's size: queries; selected blocks over all layers and groups.
constexpr int64_t kMostQueries = 128, kMostBlocks = 1 << 18;

// The tokens of the batch's first row that are sampled: all, or of a row that ranks share (dist.context), those of the
// first rank's first run.
int64_t sampled_tokens(const Activations& act) { return act.layout().chunk(0).size(); }

// Document bounds in the sampled tokens; without packed documents, the bounds of the tokens.
std::vector<int32_t> bounds_of_first_row(Context& ctx, const Activations& act) {
  const auto T = static_cast<int32_t>(sampled_tokens(act));
  if (act.bounds.empty()) return {0, T};
  std::vector<int32_t> bounds(static_cast<size_t>(act.bounds.size(0)));
  read(ctx, bounds.data(), act.bounds);
  bounds.erase(std::lower_bound(bounds.begin(), bounds.end(), T), bounds.end());
  bounds.push_back(T);
  return bounds;
}

// For each token in the batch's first row, the id of its document's first block.
std::vector<int32_t> first_blocks(Context& ctx, const Activations& act) {
  std::vector<int32_t> first(static_cast<size_t>(sampled_tokens(act)), 0);
  if (!act.documents.first_block.empty())
    read(ctx, first.data(), act.documents.first_block[0].slice(0, 0, sampled_tokens(act)));
  return first;
}

}  // namespace

std::vector<int64_t> sampled_queries(int64_t seq_len, int64_t most) {
  int64_t distance = ceil_div(seq_len, most);
  if (distance % 2 == 0) ++distance;
  std::vector<int64_t> queries;
  for (int64_t t = (seq_len - 1) % distance; t < seq_len; t += distance) queries.push_back(t);
  return queries;
}

Json selection_sample(Context& ctx, Activations& act, const ModelConfig& c, int64_t step) {
  const int64_t groups = c.n_kv_groups, n = c.nsa.n_sel;
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < c.n_layers; ++i)
    if (c.attention_of(i) != AttentionKind::dense) layers.push_back(i);
  const auto count = static_cast<int64_t>(layers.size());
  const std::vector<int64_t> queries =
      sampled_queries(sampled_tokens(act), std::clamp<int64_t>(kMostBlocks / (count * groups * n), 1, kMostQueries));
  const auto rows = static_cast<int64_t>(queries.size());
  std::vector<int32_t> host(static_cast<size_t>(count * rows * groups * n));
  Tensor sample(reinterpret_cast<std::byte*>(host.data()), DType::i32, {count, rows, groups, n}, Device::cpu());
  for (int64_t i = 0; i < count; ++i) {
    const Tensor all = act.layer(layers[static_cast<size_t>(i)]).attention.nsa.block_index;
    Tensor lists = all[0].slice(0, queries.front(), queries.back() + 1);
    if (rows > 1) lists.stride[0] *= queries[1] - queries[0];
    lists.dim[0] = rows;
    copy(ctx, sample[i], lists);
  }
  ctx.stream.synchronize();
  const std::vector<int32_t> first = first_blocks(ctx, act);
  Json all_lists = Json::array();
  for (int64_t i = 0; i < count; ++i) {
    Json layer_lists = Json::array();
    for (int64_t g = 0; g < groups; ++g) {
      Json group_lists = Json::array();
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t* const list = sample[i][r][g].ptr<int32_t>();
        // A list is filled up with -1 after its last block.
        std::vector<int32_t> blocks(list, std::find(list, list + n, -1));
        for (int32_t& block : blocks) block -= first[queries[r]];
        group_lists.push_back(std::move(blocks));
      }
      layer_lists.push_back(std::move(group_lists));
    }
    all_lists.push_back(std::move(layer_lists));
  }
  return {{"schema", kSchema},
          {"step", step},
          {"seq_len", sampled_tokens(act)},
          {"bounds", bounds_of_first_row(ctx, act)},
          {"l_sel", c.nsa.l_sel},
          {"init_blocks", c.nsa.init_blocks},
          {"local_blocks", c.nsa.local_blocks},
          {"queries", queries},
          {"layers", layers},
          {"lists", std::move(all_lists)}};
}

}  // namespace triad
