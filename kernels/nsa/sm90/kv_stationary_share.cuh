// Which tokens the KV-stationary kernels (nsa/sm90/kv_stationary.cu) compute, where the GPU decides it: all or none of
// them, or in packed rows all tokens of a document or none. Another kernel computes the others.
#pragma once
#include "kernels/common/documents.cuh"

namespace triad::cuda {

struct KvStationaryShare {
  // Rows of one document: a value that is 1 if the KV-stationary kernels compute all tokens, else 0.
  int* all = nullptr;
  // Packed rows: [B,ids], for each document at the id of its first block: how many blocks its compared tiles list (x),
  // and how many they would list without repetition within a tile (y). The document's own lists alone decide.
  int2* listed = nullptr;
  DocumentView documents = {};
  int tile_tokens = 0;    // tokens of a compared tile
  float union_limit = 0;  // a document is computed here if tile_tokens * y > union_limit * x,
  int most_tokens = 0;    // or if it is longer than this many tokens, which the other kernel does not support

  __host__ __device__ __forceinline__ bool is_packed() const { return listed != nullptr; }
  // Whether the blocks of a tile's lists without repetition, `distinct`, exceed the limit for `total` listed blocks.
  __device__ __forceinline__ bool exceeds(int total, int distinct) const {
    return static_cast<float>(distinct) * static_cast<float>(tile_tokens) > union_limit * static_cast<float>(total);
  }
  __device__ __forceinline__ bool has(int b, int t) const {
    if (!is_packed()) return all != nullptr && *all != 0;
    const DocumentRow<int> row = documents.row(b);
    const int2 of_document = listed[int64_t{b} * documents.ids + row.first_block(t)];
    return exceeds(of_document.x, of_document.y) || row.end(t) - row.begin(t) > most_tokens;
  }
  // Whether all of the tokens first .. last are of this share. False for tokens of several documents.
  __device__ __forceinline__ bool has_all(int b, int first, int last) const {
    if (is_packed() && documents.row(b).begin(first) != documents.row(b).begin(last)) return false;
    return has(b, first);
  }
};

}  // namespace triad::cuda
