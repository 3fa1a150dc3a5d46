// Which of the selected branch's tokens the KV-stationary kernels (nsa/sm90/kv_stationary.cu) compute: their share;
// another kernel computes the other tokens. The GPU decides, from the block lists, whether the share has all tokens or
// none; in packed rows it decides this for each document.
#pragma once
#include "kernels/common/documents.cuh"

namespace triad::cuda {

struct KvStationaryShare {
  // For one-document rows: *all is 1 if the share has all tokens, and 0 if it has none.
  int* all = nullptr;
  // For packed rows: [B,ids] two counts per document, at its first block's id. x: how many blocks the tokens in its
  // compared tiles list; y: the same without repetitions within a tile. So other documents in the row don't affect the
  // decision.
  int2* listed = nullptr;
  DocumentView documents = {};
  int tile_tokens = 0;    // tokens per compared tile
  float union_limit = 0;  // the share has the documents with tile_tokens * y > union_limit * x,
  int most_tokens = 0;    // and all with more tokens than this, which the other kernel doesn't support

  __host__ __device__ __forceinline__ bool is_packed() const { return listed != nullptr; }
  // Whether lists differ enough for the KV-stationary kernels. total: how many blocks they list; distinct: the same
  // without the repetitions within a tile.
  __device__ __forceinline__ bool exceeds(int total, int distinct) const {
    return static_cast<float>(distinct) * static_cast<float>(tile_tokens) > union_limit * static_cast<float>(total);
  }
  // Whether the share has token t in sequence b.
  __device__ __forceinline__ bool has(int b, int t) const {
    if (!is_packed()) return all != nullptr && *all != 0;
    const DocumentRow<int> row = documents.row(b);
    const int2 counts = listed[int64_t{b} * documents.ids + row.first_block(t)];
    return exceeds(counts.x, counts.y) || row.end(t) - row.begin(t) > most_tokens;
  }
  // Whether the share has all tokens first .. last. False if they belong to several documents.
  __device__ __forceinline__ bool has_all(int b, int first, int last) const {
    if (is_packed() && documents.row(b).begin(first) != documents.row(b).begin(last)) return false;
    return has(b, first);
  }
};

}  // namespace triad::cuda
