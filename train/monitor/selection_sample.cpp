#include "train/monitor/selection_sample.h"

#include <algorithm>
#include <iterator>

#include "kernels/common/integer.h"

namespace triad {

namespace {

constexpr int kSampleSchema = 3;
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

// For each token in the batch's first row, the id of its document's first block in a layer.
std::vector<int32_t> first_blocks(Context& ctx, const Activations& act, int64_t layer) {
  std::vector<int32_t> first(static_cast<size_t>(sampled_tokens(act)), 0);
  const Tensor all = act.documents_of(layer).first_block;
  if (!all.empty()) read(ctx, first.data(), all[0].slice(0, 0, sampled_tokens(act)));
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
  const int64_t groups = c.n_kv_groups;
  std::vector<int64_t> layers;
  int64_t listed = 0;  // blocks that a query lists, in all layers and groups
  for (int64_t i = 0; i < c.n_layers; ++i) {
    if (!c.has_lists(i)) continue;
    layers.push_back(i);
    listed += groups * c.nsa_at(i).n_sel;
  }
  const std::vector<int64_t> queries =
      sampled_queries(sampled_tokens(act), std::clamp<int64_t>(kMostBlocks / listed, 1, kMostQueries));
  const auto rows = static_cast<int64_t>(queries.size());
  std::vector<int32_t> host(static_cast<size_t>(rows * listed));
  std::vector<Tensor> samples;  // sampled lists of each layer
  for (const int64_t layer : layers) {
    const Tensor all = act.layer(layer).attention.nsa.block_index;
    Tensor lists = all[0].slice(0, queries.front(), queries.back() + 1);
    if (rows > 1) lists.stride[0] *= queries[1] - queries[0];
    lists.dim[0] = rows;
    int32_t* const at = samples.empty() ? host.data() : samples.back().ptr<int32_t>() + samples.back().numel();
    samples.emplace_back(reinterpret_cast<std::byte*>(at), DType::i32, lists.shape(), Device::cpu());
    copy(ctx, samples.back(), lists);
  }
  ctx.stream.synchronize();
  Json all_lists = Json::array(), l_sel = Json::array(), init_blocks = l_sel, local_blocks = l_sel;
  for (size_t i = 0; i < layers.size(); ++i) {
    const NsaConfig& options = c.nsa_at(layers[i]);
    l_sel.push_back(options.l_sel);
    init_blocks.push_back(options.init_blocks);
    local_blocks.push_back(options.local_blocks);
    const std::vector<int32_t> first = first_blocks(ctx, act, layers[i]);
    Json layer_lists = Json::array();
    for (int64_t g = 0; g < groups; ++g) {
      Json group_lists = Json::array();
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t* const list = samples[i][r][g].ptr<int32_t>();
        // A list is filled up with -1 after its last block.
        std::vector<int32_t> blocks(list, std::find(list, list + options.n_sel, -1));
        for (int32_t& block : blocks) block -= first[queries[r]];
        group_lists.push_back(std::move(blocks));
      }
      layer_lists.push_back(std::move(group_lists));
    }
    all_lists.push_back(std::move(layer_lists));
  }
  return {{"schema", kSampleSchema},
          {"step", step},
          {"seq_len", sampled_tokens(act)},
          {"bounds", bounds_of_first_row(ctx, act)},
          {"l_sel", std::move(l_sel)},
          {"init_blocks", std::move(init_blocks)},
          {"local_blocks", std::move(local_blocks)},
          {"queries", queries},
          {"layers", layers},
          {"lists", std::move(all_lists)}};
}

}  // namespace triad
