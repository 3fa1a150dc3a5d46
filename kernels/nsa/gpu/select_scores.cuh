// Part of the portable selection (nsa/gpu/select.cu): the kernel's arguments and shared memory, and the selection block
// scores for a tile of 16 tokens.
#pragma once
#include <cstring>

#include "kernels/common/bthd.cuh"
#include "kernels/common/documents.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/nsa/gpu/select_best.cuh"

namespace triad::cuda {
namespace {

constexpr int kTokens = 16;  // tokens per CTA: M in one mma
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kWarpKeys = 32, kTileKeys = kWarps * kWarpKeys;  // compressed keys per warp and per CTA at a time
constexpr int kElements = kTokens * kWarpKeys / 32;            // elements per lane in a warp's 16 tokens x 32 keys
constexpr int kChunk = 32;                                     // q and k columns multiplied at a time
// Shared memory holds one probability, summed over heads, for each of 256 keys and 16 tokens. A key's 16 numbers are
// kSumStride floats after the previous key's. With stride 16, threads that access different keys would often wait for
// the same shared memory bank. With 20, in bf16, neither writing these sums nor adding them up for blocks of four keys
// has bank conflicts.
constexpr int kSumStride = 20;
constexpr int64_t kSumFloats = kTileKeys * kSumStride;

// The kernel's arguments. A sequence has T tokens and Tc compressed keys. Its Hq query heads are divided into Hkv
// groups, and a group's heads share their keys and their lists.
//   block_index   the lists to write, n_sel entries for each token and group
//   q, k, lse     the queries, the compressed keys, and the log-sum-exp of each query's scores for these keys
//   l, d, l_sel   tokens in a compressed key, tokens from one to the next, tokens in a selection block (l')
template <class T>
struct Select {
  Bthd<int32_t> block_index;
  Bthd<const T> q, k;
  Bthd<const float> lse;        // [sequences,T,Hq,1]
  int first_token, tokens;      // the tokens that have queries: [first_token, tokens), by default [0, T)
  int keys, groups, heads, dk;  // Tc, Hkv, query heads per group, head width
  int l, d, l_sel, n_sel, init_blocks, local_blocks;
  int every;                     // row t of q, lse and block_index is that of token every * t (nsa/gpu/share_lists.h)
  int span, size;                // l / d and l_sel / d: compressed key and block length in units of d tokens
  float scale;                   // factor for q.k in probability()
  bool vectors;                  // whether rows of q and k consist of aligned 16-byte vectors
  int chunks;                    // kChunk-column chunks in a q row in shared memory; zeros from column dk on
  int head_turn;                 // heads whose q is in shared memory at a time
  int sum_floats;                // floats in Shared::sums, or in Shared::carries
  int64_t items;                 // work items: one per tile of 16 tokens, sequence and group
  int64_t sequences_and_groups;  // B * Hkv
  float* slab;                   // [CTAs, slab_stride]: scores in scratch; nullptr: scores are in shared memory
  int64_t slab_stride;
  DocumentView documents;

  // For row t, counted in its document: how many compressed keys its token sees, and its selection rule.
  __device__ int visible(int t) const { return blocks_within(t * every + 1, l, d, keys); }
  __device__ SelectionRule<int> rule(int t) const { return {t * every, l_sel, n_sel, init_blocks, local_blocks}; }
};

// Returns a row's 16 bytes from `column` on. Elements from column dk on are 0, and so are all in a null row. vectors:
// whether rows consist of whole 16-byte vectors at aligned addresses.
template <class T>
__device__ __forceinline__ uint4 load_piece(const T* row, int column, int dk, bool vectors) {
  if (row == nullptr || column >= dk) return make_uint4(0, 0, 0, 0);
  if (vectors) return *reinterpret_cast<const uint4*>(row + column);
  T piece[kVector<T>];
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) piece[i] = column + i < dk ? row[column + i] : from_float<T>(0.0f);
  uint4 packed;
  memcpy(&packed, piece, sizeof packed);
  return packed;
}

// One kChunk-column chunk of a warp's 32 keys, in registers, and its product with one head's queries for the 16 tokens.
//   load()           loads the chunk. multiply() adds the product to the lane's kElements sums.
//   token(), key()   the token and the key for element e in the lane's sums.
//   store_query()    stores 16-byte piece i of a head's chunk of q, which begins at token query_token(i) and column
//                    query_column(i), to shared memory in the order that multiply() reads.
// With kPoolsInRegisters (bf16 only), the keys are ordered so that a lane's eight sums for a token belong to two
// selection blocks, four keys each.
template <class T, bool kPoolsInRegisters>
struct Keys;

// bf16, on tensor cores. A product's columns may be in any order that is the same in both operands. Among a chunk's 32
// columns, lane l holds the 8 columns 8*(l%4) .. 8*(l%4) + 7, for two mma with depth 16. A lane's part of a key is then
// one 16-byte load, and queries are stored in the mma's order: [mma][lane][row l/4, row l/4 + 8, both again for the
// next columns].
template <bool kPoolsInRegisters>
struct Keys<__nv_bfloat16, kPoolsInRegisters> {
  static constexpr int kQueryPieces = 64;  // 16-byte pieces in a head's chunk: one per lane for tokens 0-7, then 8-15
  uint4 piece[kWarpKeys / 8];

  __device__ static int query_token(int i) { return i / 32 * 8 + i % 32 / 4; }
  __device__ static int query_column(int i) { return i % 4 * 8; }
  __device__ static int token(int e) { return threadIdx.x % 32 / 4 + e % 4 / 2 * 8; }
  __device__ static int key(int e) { return key_of(e / 4, threadIdx.x % 4 * 2 + e % 2); }
  // All lanes' pieces j together hold a chunk of 8 of the warp's 32 keys. key_of(j, c) returns which of the 32 keys is
  // number c (0 to 7) among these 8.
  //   Without kPoolsInRegisters, piece j holds the keys 8 j .. 8 j + 7, in ascending order.
  //   With kPoolsInRegisters, the pieces 2 i and 2 i + 1 hold the keys 16 i .. 16 i + 15. A piece's product gives each
  //   lane two keys' sums. The order is such that a lane's four keys in both pieces are neighbours.
  __device__ static int key_of(int j, int c) {
    return kPoolsInRegisters ? 16 * (j / 2) + 4 * (c / 2) + 2 * (j % 2) + c % 2 : 8 * j + c;
  }

  __device__ static int lane_first_key() { return key_of(0, threadIdx.x % 32 / 4); }

  __device__ __forceinline__ static void store_query(uint4* queries, int i, uint4 piece) {
    uint32_t* step = reinterpret_cast<uint32_t*>(queries + i % 32) + i / 32;
    step[0] = piece.x, step[2] = piece.y;
    step += 32 * 4;
    step[0] = piece.z, step[2] = piece.w;
  }
  // row: the lane's first key, which is key lane_first_key() among the warp's 32. count: how many keys there are from
  // that one to the last. With kPoolsInRegisters, a lane loads the last key again in place of the keys after it, so at
  // least one key must exist, and `stride` must fit 32 bits, which saves instructions.
  __device__ __forceinline__ void load(const __nv_bfloat16* row, int64_t stride, int count, int column, int dk,
                                       bool vectors) {
    column += threadIdx.x % 4 * 8;
#pragma unroll
    for (int j = 0; j < kWarpKeys / 8; ++j) {
      const int ahead = key_of(j, 0);
      if constexpr (kPoolsInRegisters) {
        const __nv_bfloat16* from = row + int64_t{min(ahead, count - 1)} * static_cast<int>(stride);
        piece[j] = column < dk ? *reinterpret_cast<const uint4*>(from + column) : make_uint4(0, 0, 0, 0);
      } else {
        piece[j] = load_piece(ahead < count ? row + ahead * stride : nullptr, column, dk, vectors);
      }
    }
  }
  __device__ __forceinline__ void multiply(float (&sum)[kWarpKeys / 8][4], const uint4* queries) const {
    const uint4 q0 = queries[threadIdx.x % 32], q1 = queries[32 + threadIdx.x % 32];
    const uint32_t a0[4] = {q0.x, q0.y, q0.z, q0.w}, a1[4] = {q1.x, q1.y, q1.z, q1.w};
#pragma unroll
    for (int j = 0; j < kWarpKeys / 8; ++j) mma_m16n8k16(sum[j], a0, piece[j].x, piece[j].y);
#pragma unroll
    for (int j = 0; j < kWarpKeys / 8; ++j) mma_m16n8k16(sum[j], a1, piece[j].z, piece[j].w);
  }
};

// f32, with FFMA. A lane keeps one key's chunk; all lanes read the same query element at a time.
template <>
struct Keys<float, false> {
  static constexpr int kQueryPieces = kTokens * kChunk / 4;  // [token][4 columns]
  uint4 piece[kChunk / 4];

  __device__ static int query_token(int i) { return i / (kChunk / 4); }
  __device__ static int query_column(int i) { return i % (kChunk / 4) * 4; }
  __device__ static int token(int e) { return e; }
  __device__ static int key(int) { return threadIdx.x % 32; }

  __device__ static int lane_first_key() { return threadIdx.x % 32; }

  __device__ __forceinline__ static void store_query(uint4* queries, int i, uint4 piece) { queries[i] = piece; }
  __device__ __forceinline__ void load(const float* row, int64_t, int count, int column, int dk, bool vectors) {
#pragma unroll
    for (int j = 0; j < kChunk / 4; ++j) piece[j] = load_piece(count > 0 ? row : nullptr, column + 4 * j, dk, vectors);
  }
  __device__ __forceinline__ void multiply(float (&sum)[kWarpKeys / 8][4], const uint4* queries) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      float& s = sum[e / 4][e % 4];
#pragma unroll
      for (int j = 0; j < kChunk / 4; ++j) {
        const float4 q = reinterpret_cast<const float4*>(queries)[e * (kChunk / 4) + j];
        s = fmaf(q.x, __uint_as_float(piece[j].x), s);
        s = fmaf(q.y, __uint_as_float(piece[j].y), s);
        s = fmaf(q.z, __uint_as_float(piece[j].z), s);
        s = fmaf(q.w, __uint_as_float(piece[j].w), s);
      }
    }
  }
};

// The query order in shared memory doesn't depend on the key order.
template <class T>
using QueryOrder = Keys<T, false>;

// probability() returns exp(q.k / sqrt(dk) - lse), given product = q.k. For bf16 inputs it computes the exponential
// with the approximate exp2; scale and lse are therefore given with a factor kExpBase = log2(e).
template <class T>
constexpr float kExpBase = std::is_same_v<T, float> ? 1.0f : kLog2e;
template <class T>
__device__ __forceinline__ float probability(float product, float scale, float lse) {
  const float x = fmaf(product, scale, -lse);
  if constexpr (std::is_same_v<T, float>)
    return expf(x);
  else
    return exp2_approx(x);
}

// Pointers into the CTA's shared memory. Scores that do not fit there are in scratch memory.
struct Shared {
  uint4* queries;         // [heads per turn][chunks][Keys::kQueryPieces]
  float* lse;             // [heads per turn][16 tokens], times kExpBase; +inf for a token without visible keys: p = 0
  float* sums;            // [256 keys][16 tokens], kSumStride floats per row: probabilities, summed over heads
  float* carries;         // replaces sums with kPoolsInRegisters, [keys / 32, rounded up][16]: see score_blocks()
  int* visible;           // [16 tokens]: how many compressed keys the token sees
  Candidate* candidates;  // [8 warps][kCandidates]: what a warp collects to write a list
  float* scores;          // [blocks][16 tokens], kScoreStride floats per row: the blocks' scores
  template <class T>
  __device__ explicit Shared(const Select<T>& s)
      : queries(reinterpret_cast<uint4*>(dynamic_shared())),
        lse(reinterpret_cast<float*>(queries + s.head_turn * s.chunks * QueryOrder<T>::kQueryPieces)),
        sums(lse + s.head_turn * kTokens),
        carries(sums),
        visible(reinterpret_cast<int*>(sums + s.sum_floats)),
        candidates(reinterpret_cast<Candidate*>(visible + kTokens)),
        scores(s.slab != nullptr ? s.slab + blockIdx.x * s.slab_stride
                                 : reinterpret_cast<float*>(candidates + kWarps * kCandidates)) {}
  template <class T>
  static int64_t bytes(int64_t head_turn, int64_t chunks, int64_t sum_floats) {
    return head_turn * (chunks * QueryOrder<T>::kQueryPieces * 16 + kTokens * 4) + sum_floats * 4 + kTokens * 4 +
           kWarps * kCandidates * static_cast<int64_t>(sizeof(Candidate));
  }
};

// A work item: the tokens first .. last, at most 16, in sequence b and group g.
struct Tile {
  int64_t b;
  int g, first, last;
  template <class T>
  __device__ Tile(const Select<T>& s, int64_t item) {
    const int64_t bg = item % s.sequences_and_groups, tiles = ceil_div(s.tokens - s.first_token, kTokens);
    b = bg / s.groups;
    g = static_cast<int>(bg % s.groups);
    // The last tokens have the most work, so their items are the first.
    first = s.first_token + static_cast<int>(tiles - 1 - item / s.sequences_and_groups) * kTokens;
    last = min(first + kTokens, s.tokens) - 1;
  }
};

// A tile's tokens first .. last that belong to the same document as `first`. The kernel counts a document's positions,
// keys and blocks from 0; to each count it adds the document's first one.
struct DocumentTile : Tile {
  int begin, first_key, first_block;  // the document's first token, compressed key and block id, in the row
  template <class T>
  __device__ DocumentTile(const Select<T>& s, const Tile& tile, int first_token) : Tile(tile) {
    const DocumentRow<int> row = s.documents.row(static_cast<int>(b));
    first = first_token;
    last = min(last, row.end(first) - 1);
    begin = row.begin(first), first_key = row.first_key(first, s.d), first_block = row.first_block(first);
  }
};

// Loads q and lse for the tile's tokens into shared memory, for the group's heads head0 .. head0 + heads - 1. Past the
// last token q is 0 and lse is +inf, so that p = 0.
template <class T>
__device__ void load_queries(const Select<T>& s, const Shared& shared, const Tile& tile, int head0, int heads) {
  for (int i = threadIdx.x; i < heads * s.chunks * QueryOrder<T>::kQueryPieces; i += kThreads) {
    const int in_block = i % QueryOrder<T>::kQueryPieces, block = i / QueryOrder<T>::kQueryPieces;
    const int t = tile.first + QueryOrder<T>::query_token(in_block), h = tile.g * s.heads + head0 + block / s.chunks;
    const int column = block % s.chunks * kChunk + QueryOrder<T>::query_column(in_block);
    QueryOrder<T>::store_query(shared.queries + block * QueryOrder<T>::kQueryPieces, in_block,
                               load_piece(t <= tile.last ? s.q.row(tile.b, t, h) : nullptr, column, s.dk, s.vectors));
  }
  for (int i = threadIdx.x; i < heads * kTokens; i += kThreads) {
    const int t = tile.first + i % kTokens, h = tile.g * s.heads + head0 + i / kTokens;
    const float lse = t <= tile.last ? *s.lse.row(tile.b, t, h) : -INFINITY;
    shared.lse[i] = lse == -INFINITY ? INFINITY : lse * kExpBase<T>;
  }
}

// Adds the summed probabilities for the keys [c0, c1) to the scores of the blocks [0, blocks), weighted by overlap
// (paper Eq. 9). In units of d tokens, key c covers [c, c + span) and block j covers [j*size, (j+1)*size). The weight
// is how many units both cover. It is l/d times Eq. 9's weight; the factor doesn't change the scores' order. kSpan and
// kSize: span and size, if they are known at compile time, else 0.
template <int kSpan, int kSize, class T>
__device__ __forceinline__ void pool_keys(const Select<T>& s, const Shared& shared, int c0, int c1, int blocks) {
  const int span = kSpan > 0 ? kSpan : s.span, size = kSize > 0 ? kSize : s.size;
  const int overlaps = span + size - 1;  // keys that overlap a block
  const int largest_weight = min(span, size);
  const int token = threadIdx.x % kTokens;
  const int j1 = min((c1 + span - 2) / size + 1, blocks);
  for (int j = c0 / size + static_cast<int>(threadIdx.x) / kTokens; j < j1; j += kThreads / kTokens) {
    const int first = j * size - span + 1 - c0;  // the first key that overlaps block j, counted from c0
    float score = shared.scores[j * kScoreStride + token];
#pragma unroll
    for (int i = kSize > 0 ? 0 : max(0, -first); i < (kSize > 0 ? overlaps : min(overlaps, c1 - c0 - first)); ++i) {
      const int c = first + i;
      if (kSize == 0 || static_cast<unsigned>(c) < static_cast<unsigned>(c1 - c0))
        score = fmaf(static_cast<float>(min(min(i + 1, overlaps - i), largest_weight)),
                     shared.sums[c * kSumStride + token], score);
    }
    shared.scores[j * kScoreStride + token] = score;
  }
}
template <class T>
__device__ __forceinline__ void pool(const Select<T>& s, const Shared& shared, int c0, int c1, int blocks) {
  if (s.span == 2 && s.size == 4)  // the usual l = 32, d = 16, l' = 64, or another l = 2 d with l' = 4 d
    pool_keys<2, 4>(s, shared, c0, c1, blocks);
  else
    pool_keys<0, 0>(s, shared, c0, c1, blocks);
}

// A warp's 32 keys. If kHeld > 0, all kHeld chunks stay in registers for all heads. If kHeld = 0, each chunk is loaded
// when it is multiplied, for each head. The members are copies, since a function that is not inlined would read
// Select's members from memory for each head.
template <class T, bool kPoolsInRegisters, int kHeld>
struct WarpKeys {
  using Chunk = Keys<T, kPoolsInRegisters>;
  Chunk held[kHeld > 0 ? kHeld : 1];
  const uint4* queries;  // Shared::queries and Shared::lse
  const float* lse;
  int64_t stride;  // elements from one key to the next
  int dk, chunks;
  bool vectors;
  float scale;

  __device__ __forceinline__ WarpKeys(const Select<T>& s, const Shared& shared)
      : queries(shared.queries),
        lse(shared.lse),
        stride(s.k.stride_t),
        dk(s.dk),
        chunks(s.chunks),
        vectors(s.vectors),
        scale(s.scale) {}

  // row: the lane's first key. count: as in Keys::load().
  __device__ __forceinline__ void load(const T* row, int count) {
    if constexpr (kHeld > 0)
#pragma unroll
      for (int i = 0; i < kHeld; ++i) held[i].load(row, stride, count, i * kChunk, dk, true);
  }
  // Adds to the lane's sums the probabilities for the `heads` heads in shared memory. row and count are as in load();
  // they are read only if kHeld = 0.
  __device__ __forceinline__ void add_heads(float (&sum)[kElements], const T* row, int count, int heads) {
#pragma unroll(kHeld >= 4 ? 2 : 1)
    for (int h = 0; h < heads; ++h) {
      const uint4* head = queries + h * chunks * Chunk::kQueryPieces;
      float product[kWarpKeys / 8][4] = {};
      if constexpr (kHeld > 0) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) held[i].multiply(product, head + i * Chunk::kQueryPieces);
      } else {
        for (int i = 0; i < chunks; ++i) {
          held[0].load(row, stride, count, i * kChunk, dk, vectors);
          held[0].multiply(product, head + i * Chunk::kQueryPieces);
        }
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        sum[e] += probability<T>(product[e / 4][e % 4], scale, lse[h * kTokens + Chunk::token(e)]);
    }
  }
};

// The warp's 32 keys begin at c0. Sets the sums to 0 for keys that a token doesn't see. The first token sees the fewest
// keys; if it sees all 32, nothing has to be set. Tokens after the last one have lse = inf, so their probabilities are
// 0 anyway.
template <class Chunk>
__device__ __forceinline__ void mask_sums(float (&sum)[kElements], const Shared& shared, int c0) {
  if (c0 + kWarpKeys <= shared.visible[0]) return;
#pragma unroll
  for (int e = 0; e < kElements; ++e)
    if (c0 + Chunk::key(e) >= shared.visible[Chunk::token(e)]) sum[e] = 0.0f;
}

// Adds to the scores of the blocks [0, blocks) what the `heads` heads in shared memory contribute, over the document's
// compressed keys [0, keys).
template <class T, int kHeld>
__device__ __forceinline__ void add_scores_of_heads(const Select<T>& s, const Shared& shared, const DocumentTile& tile,
                                                    int heads, int keys, int blocks) {
  using Chunk = Keys<T, false>;
  const int warp_key = threadIdx.x / 32 * kWarpKeys, lane_key = warp_key + Chunk::lane_first_key();
  const T* row = s.k.row(tile.b, tile.first_key + lane_key, tile.g);  // this lane's first key in the current tile
  WarpKeys<T, false, kHeld> warp_keys(s, shared);
  warp_keys.load(row, keys - lane_key);
  for (int c0 = 0; c0 < keys; c0 += kTileKeys) {
    float sum[kElements] = {};
    if (c0 + warp_key < keys) {
      warp_keys.add_heads(sum, row, keys - c0 - lane_key, heads);
      mask_sums<Chunk>(sum, shared, c0 + warp_key);
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) shared.sums[(warp_key + Chunk::key(e)) * kSumStride + Chunk::token(e)] = sum[e];
    row += kTileKeys * s.k.stride_t;
    warp_keys.load(row, keys - c0 - kTileKeys - lane_key);  // prefetch, overlapped with pool()
    __syncthreads();
    pool(s, shared, c0, min(c0 + kTileKeys, keys), blocks);
    __syncthreads();
  }
}

// Computes the scores for a document's selection blocks 0 .. blocks - 1 and a tile of tokens, from all the group's
// heads.
//   key_rows   the k row that has the document's first compressed key
//   keys       how many compressed keys to use: the last block's keys all exist, or all but the last one
// This function is for bf16 and for l = 2 d and l' = 4 d: a block has four keys, and each key overlaps the next one.
// The warps do not wait for each other until all scores are computed.
//
// Five keys overlap block j: 4 j - 1, 4 j, 4 j + 1, 4 j + 2 and 4 j + 3. Their weights are 1, 2, 2, 2 and 1. The lane
// that computes block j's score has the sums for the last four of these keys, and gets key 4 j - 1's sum from the lane
// before. If key 4 j - 1 belongs to another warp, which is so if j is a multiple of 8, that warp stores the sum in
// carries[j / 8 - 1]. When all warps are done, the carries are added to these blocks' scores.
//
// The function is not inlined. Inlined, the loop over heads would have fewer registers, because values that only the
// rest of the kernel uses would occupy them.
template <int kHeld>
__device__ __noinline__ void score_blocks(const Select<__nv_bfloat16>& s, const __nv_bfloat16* key_rows, int keys,
                                          int blocks) {
  using Chunk = Keys<__nv_bfloat16, true>;
  constexpr int kSize = 4, kWarpBlocks = kWarpKeys / kSize;  // keys per block, blocks per warp
  const Shared shared(s);
  const int warp_key = threadIdx.x / 32 * kWarpKeys, lane_key = warp_key + Chunk::lane_first_key(),
            quad = threadIdx.x % 4;
  WarpKeys<__nv_bfloat16, true, kHeld> warp_keys(s, shared);
  const __nv_bfloat16* row = key_rows + lane_key * warp_keys.stride;
  const int heads = s.heads;
  warp_keys.load(row, keys - lane_key);
  for (int c0 = warp_key; c0 < keys; c0 += kTileKeys) {
    float sum[kElements] = {};
    warp_keys.add_heads(sum, row, 0, heads);
    row += kTileKeys * warp_keys.stride;
    warp_keys.load(row, keys - c0 - kTileKeys - Chunk::lane_first_key());
    mask_sums<Chunk>(sum, shared, c0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // the lane's two tokens
      const int token = Chunk::token(2 * i);
      float from_last_lane = 0.0f;  // lane 0 of the four: for the second 16 keys, the last of the first 16
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* x = sum + 8 * half + 2 * i;  // the block's keys are x[0], x[1], x[4] and x[5]
        const float before = __shfl_sync(kFullWarp, x[5], (threadIdx.x + 3) % 4, 4);
        const float score = fmaf(2.0f, x[0] + x[1] + x[4], x[5]) + (quad > 0 ? before : from_last_lane);
        const int j = c0 / kSize + 4 * half + quad;
        if (j < blocks) shared.scores[j * kScoreStride + token] = score;
        from_last_lane = before;
      }
      if (quad == 3) shared.carries[c0 / kWarpKeys * kTokens + token] = sum[8 + 2 * i + 5];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x / kTokens; (i + 1) * kWarpBlocks < blocks; i += kThreads / kTokens) {
    const int token = threadIdx.x % kTokens;
    shared.scores[(i + 1) * kWarpBlocks * kScoreStride + token] += shared.carries[i * kTokens + token];
  }
  __syncthreads();
}

}  // namespace
}  // namespace triad::cuda
