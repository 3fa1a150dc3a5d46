/* triad_nsa.h: Native Sparse Attention (arXiv 2502.11089), forward and backward, in plain C. This folder's README.md
 * shows how to build and link; example.c is a short example.
 *
 * What it computes, for token t and query head h of group g = h / (Hq / Hkv):
 *
 *   out[t,h] = sum over the branches b in (cmp, sel, win) of gate_b[t] * o_b[t,h]
 *   o_b[t,h] = softmax attention for q[t,h] with scale `scale` over the keys that branch b gives token t:
 *     cmp  compressed blocks c that end by t: block c covers the tokens [c*d, c*d + l), its key and value are the means
 *          of k[0] and v[0], or what the caller gives as k_cmp and v_cmp
 *     sel  the tokens <= t in `selected` blocks of `block` tokens: the first `init_blocks`, the last `local_blocks` up
 *          to t's own, and then those with the highest importance in branch cmp. All heads in a group share the same
 *          list. No gradient flows through the choice.
 *     win  the tokens t - window + 1 .. t
 *   A row without keys gives 0. If q and k are to be rotated (RoPE), the caller does it.
 *
 * Symbols: B sequences with T tokens; Hq query heads in Hkv key and value groups; dk and dv head widths;
 * Tc = T < l ? 0 : (T - l) / d + 1 compressed blocks. `type` is q's element type, `acc` its accumulator type: f32
 * for bf16 and f32, f64 for f64. GPUs compute bf16 and f32; the CPU computes bf16, f32 and f64.
 *
 * Conventions for every function that takes a context:
 *  - It returns a status and never aborts, throws or prints. After a status other than TRIAD_NSA_OK the text from
 *    triad_nsa_last_error() names what was wrong, with its value, and nothing has been queued; after
 *    TRIAD_NSA_ERROR_CUDA part of the work may have been.
 *  - The caller owns all memory, and passes pointers to memory on the context's device. Device memory is never
 *    allocated. Temporaries are in the workspace, which may be reused as soon as the work is done, in stream order.
 *  - Workspace size: with workspace == NULL the function checks its arguments, sets *workspace_bytes (at least 1) and
 *    queues nothing; data pointers may be NULL then. With a workspace, *workspace_bytes is its size, at least the size
 *    so found. The size depends on shapes, dtypes, strides, options, which optional tensors are present, and the
 *    documents' `count` and `max_per_row`, not on addresses or contents, so it can be kept.
 *  - Work is queued on `stream`, a cudaStream_t (NULL: the legacy default stream), and the host is never blocked. The
 *    calls can be captured in a CUDA graph; run each call once before the capture, so that CUDA has loaded its
 *    kernels. On the CPU `stream` is ignored and the work is done when the function returns.
 *  - Outputs are overwritten; their old contents do not matter. Inputs and outputs may not overlap.
 *  - One context may be used by several threads and on several streams at the same time, and a device may have several
 *    contexts. Only triad_nsa_context_destroy has to be alone. The calling thread's current CUDA device stays as it
 *    was. What the library remembers between calls belongs to the context or the thread, holds no address that it reads
 *    later, and does not survive cudaDeviceReset: make no calls after it.
 *  - Equal inputs give equal bits on a given device.
 */
/* Columns are aligned by hand. */
/* clang-format off */
#ifndef TRIAD_NSA_H
#define TRIAD_NSA_H
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TRIAD_NSA_API __attribute__((visibility("default")))
#else
#define TRIAD_NSA_API
#endif

#define TRIAD_NSA_VERSION 100 /* 10000 * major + 100 * minor + patch */

#ifdef __cplusplus
extern "C" {
#endif

typedef enum triad_nsa_status {
  TRIAD_NSA_OK = 0,
  TRIAD_NSA_ERROR_ARGUMENT = 1,    /* a shape, dtype, option, NULL pointer or struct_size */
  TRIAD_NSA_ERROR_STRIDE = 2,      /* strides that a tensor cannot have */
  TRIAD_NSA_ERROR_BOUNDS = 3,      /* document bounds that are out of order or do not end with the tokens */
  TRIAD_NSA_ERROR_DEVICE = 4,      /* no such device, or memory on another device than the context's */
  TRIAD_NSA_ERROR_UNSUPPORTED = 5, /* an architecture or dtype without kernels, or a library built without CUDA */
  TRIAD_NSA_ERROR_WORKSPACE = 6,   /* a workspace that is too small */
  TRIAD_NSA_ERROR_CUDA = 7,        /* a CUDA runtime error */
  TRIAD_NSA_ERROR_MEMORY = 8,      /* the host is out of memory */
  TRIAD_NSA_ERROR_INTERNAL = 9,    /* anything else: a defect in the library */
  TRIAD_NSA_ERROR_LISTS = 10       /* block lists with an entry that no list may have */
} triad_nsa_status;

/* The message of the calling thread's last error; "" if it had none. Valid until the thread's next call. */
TRIAD_NSA_API const char* triad_nsa_last_error(void);
TRIAD_NSA_API const char* triad_nsa_status_name(int status); /* "TRIAD_NSA_ERROR_STRIDE" */
TRIAD_NSA_API int triad_nsa_version(void);                   /* the library's TRIAD_NSA_VERSION */
TRIAD_NSA_API const char* triad_nsa_build_info(void);        /* "0.1.0, CUDA 13.0, architectures ..." */
TRIAD_NSA_API int triad_nsa_cuda_device_count(void);         /* 0 without CUDA, a driver or a GPU */

/* ---- context ---- */

/* What the library keeps for a device: its properties, and streams for work parallel to the caller's. */
typedef struct triad_nsa_context triad_nsa_context;

#define TRIAD_NSA_CPU (-1)
/* device: TRIAD_NSA_CPU or the CUDA ordinal. Creates streams and events, so do it outside a capture, once a device. */
TRIAD_NSA_API triad_nsa_status triad_nsa_context_create(triad_nsa_context** context, int device);
/* Requires that all work queued through the context is done. Graphs captured through it may be launched afterwards. */
TRIAD_NSA_API void triad_nsa_context_destroy(triad_nsa_context* context); /* NULL is allowed */
TRIAD_NSA_API int triad_nsa_context_device(const triad_nsa_context* context);
/* Sets how many threads a call uses on the CPU, at least 1. Default: OMP_NUM_THREADS, or the cores that the process
 * may use. Results do not depend on it. */
TRIAD_NSA_API triad_nsa_status triad_nsa_context_set_threads(triad_nsa_context* context, int threads);

/* ---- arguments ---- */

typedef enum triad_nsa_dtype {
  TRIAD_NSA_F64 = 0,
  TRIAD_NSA_F32 = 1,
  TRIAD_NSA_BF16 = 2,
  TRIAD_NSA_I32 = 3
} triad_nsa_dtype;

typedef enum triad_nsa_branch { TRIAD_NSA_CMP = 0, TRIAD_NSA_SEL = 1, TRIAD_NSA_WIN = 2 } triad_nsa_branch;

#define TRIAD_NSA_MAX_RANK 5
/* A view of memory. A rank-0 tensor is absent (all bytes 0), which optional tensors may be.
 * Strides are in elements. Tensors with head widths (q, k, v, o, out, their gradients, k_cmp, v_cmp) need stride 1 on
 * the last axis; other strides must be at least 1 and such that no two elements share memory. Strides of size-1 axes
 * are ignored. Gates may have any strides, 0 too where they are inputs. lse and block_index are contiguous. A tensor's
 * last element is less than 2^58 elements from the first.
 * On a GPU outputs with head widths are at addresses that are multiples of 16 bytes, and the fastest kernels need that
 * for inputs too, and for all strides but the last; other views work, more slowly. */
typedef struct triad_nsa_tensor {
  void* data;
  int32_t dtype; /* triad_nsa_dtype */
  int32_t rank;
  int64_t size[TRIAD_NSA_MAX_RANK];
  int64_t stride[TRIAD_NSA_MAX_RANK];
} triad_nsa_tensor;

typedef enum triad_nsa_kernels {
  TRIAD_NSA_KERNELS_FASTEST = 0,  /* the fastest kernel for the card and the shape */
  TRIAD_NSA_KERNELS_PORTABLE = 1, /* the kernels that run on any card */
  TRIAD_NSA_KERNELS_REFERENCE = 2 /* the portable ones on f32 copies of bf16 operands; all on the CPU: the same code */
} triad_nsa_kernels;

/* Flags for triad_nsa_options. */
#define TRIAD_NSA_UNCHECKED_POINTERS 1u /* the caller vouches that all pointers are memory on the context's device */
#define TRIAD_NSA_SIGNED_GATES 2u       /* gates may be negative. Without it a gate per group has to be >= 0: Hopper's
                                           backward gives NaN for a negative one. It costs backward three products as
                                           large as dout; gates per head have that cost and that freedom always */
#define TRIAD_NSA_GIVEN_LISTS 4u        /* triad_nsa_forward does not select: branch sel attends to the lists that the
                                           caller has put into saved's block_index, from anywhere */

typedef struct triad_nsa_options {
  size_t struct_size;      /* sizeof(triad_nsa_options); fields that a later version adds follow the last one */
  int64_t compress_length; /* l, tokens per compressed block: a multiple of d */
  int64_t compress_stride; /* d, tokens from one compressed block to the next */
  int64_t block;           /* l', tokens per selection block: a multiple of d */
  int64_t selected;        /* n, blocks per list, at least init_blocks + local_blocks */
  int64_t window;          /* w, tokens, at least 1 */
  int64_t init_blocks;     /* first blocks that each list holds, at least 0 */
  int64_t local_blocks;    /* last blocks that each list holds, the token's own among them, at least 1 */
  double scale;            /* factor on q.k before the softmax; 0: 1 / sqrt(dk). For any other scale, q is multiplied
                              by scale * sqrt(dk) first, and rounded to `type` (exactly, if that is a power of two) */
  int32_t kernels;         /* triad_nsa_kernels */
  uint32_t flags;
} triad_nsa_options;
/* l 32, d 16, block 64, selected 16, window 512, init_blocks 1, local_blocks 2, scale 0, fastest kernels, no flags. */
TRIAD_NSA_API void triad_nsa_default_options(triad_nsa_options* options);

/* Packed rows: the B * T tokens, row by row, hold documents, one after another. Each document has the same result
 * as alone: positions, blocks and windows count from its first token, and nothing crosses.
 * Compressed block c of the document that begins at token s in its row is row floor(s / d) + c of k_cmp and v_cmp
 * [B,Tc,Hkv,..], with Tc for the whole row of T tokens. Rows that belong to no document are 0; where the caller gives
 * k_cmp and v_cmp they have to be finite, and their gradients are 0. Selection block j of document number i in the row
 * is number floor(s / block) + i + j in block_index. */
typedef struct triad_nsa_documents {
  const int32_t* cu_seqlens; /* [count + 1], on the context's device: document i is the tokens [cu_seqlens[i],
                                cu_seqlens[i+1]) in all rows. First 0, ascending, last B * T, a bound at each multiple
                                of T (no document crosses a row); repetitions of B * T at the end are allowed.
                                The CPU checks this; for a GPU triad_nsa_check_documents does, and bounds that break it
                                make the result undefined */
  int64_t count;             /* 0: no documents, every row is one; cu_seqlens is ignored */
  int64_t max_per_row;       /* the most documents per row; 0: count */
} triad_nsa_documents;
/* Copies the bounds to the host, waits for the stream, and returns TRIAD_NSA_ERROR_BOUNDS unless they are as above.
 * Not allowed in a capture. */
TRIAD_NSA_API triad_nsa_status triad_nsa_check_documents(triad_nsa_context*, void* stream, int64_t B, int64_t T,
                                                         const triad_nsa_documents*);

/* ---- NSA as a whole ---- */

typedef struct triad_nsa_inputs {
  size_t struct_size;
  triad_nsa_tensor q;    /* [B,T,Hq,dk] type */
  triad_nsa_tensor k[3]; /* [B,T,Hkv,dk] type, by triad_nsa_branch. k[1] and k[2] absent: k[0] serves all three */
  triad_nsa_tensor v[3]; /* [B,T,Hkv,dv] type, likewise, and shared or not independently of k */
  triad_nsa_tensor k_cmp, v_cmp; /* learned compression: [B,Tc,Hkv,dk], [B,Tc,Hkv,dv] type, both or neither; absent:
                                    averages. If given and k (v) is not shared, k[0] (v[0]) is not read and may be
                                    absent */
  triad_nsa_tensor gate; /* [B,T,Hkv,3] or [B,T,Hq,3], type or acc: factors, not logits; absent: 1/3 each.
                            If Hq == Hkv the two are the same */
  triad_nsa_documents documents;
} triad_nsa_inputs;

/* What forward leaves for backward. Contiguous, at addresses that are multiples of 16 bytes; triad_nsa_saved_bytes
 * reports the sizes. */
typedef struct triad_nsa_saved {
  size_t struct_size;
  void* o[3];           /* [B,T,Hq,dv] type: the branches' outputs, before the gates */
  void* lse[3];         /* [B,T,Hq] acc: the scaled scores' log-sum-exp; -inf for a row without keys */
  int32_t* block_index; /* [B,T,Hkv,selected]: the lists, ascending, padded at the end with -1; TRIAD_NSA_GIVEN_LISTS:
                           an input of forward */
  void *k_cmp, *v_cmp;  /* [B,Tc,Hkv,dk], [B,Tc,Hkv,dv] type: the averages; ignored where the caller gives k_cmp */
} triad_nsa_saved;
typedef struct triad_nsa_saved_sizes {
  size_t struct_size;
  int64_t compressed;                      /* Tc */
  size_t o, lse, block_index, k_cmp, v_cmp; /* bytes of each tensor; k_cmp and v_cmp 0 where the caller gives k_cmp */
} triad_nsa_saved_sizes;
TRIAD_NSA_API triad_nsa_status triad_nsa_saved_bytes(triad_nsa_context*, const triad_nsa_options*,
                                                     const triad_nsa_inputs*, triad_nsa_saved_sizes*);

/* out [B,T,Hq,dv] type overwritten, saved overwritten. saved == NULL, or a field NULL: that tensor is in the workspace
 * and lost, for inference. For the workspace query, NULL fields mean the same; other addresses are not used. */
TRIAD_NSA_API triad_nsa_status triad_nsa_forward(triad_nsa_context*, void* stream, const triad_nsa_options*,
                                                 const triad_nsa_inputs*, const triad_nsa_tensor* out,
                                                 const triad_nsa_saved* saved, void* workspace,
                                                 size_t* workspace_bytes);

/* The gradients that backward overwrites; it computes none that is absent. Shapes are the inputs'. Each dtype is type
 * or acc, the same for a branch's k[i] and v[i]. */
typedef struct triad_nsa_gradients {
  size_t struct_size;
  triad_nsa_tensor q;    /* fastest in acc, contiguous and with the default scale: no conversion */
  triad_nsa_tensor k[3]; /* if k is shared: k[0], the sum over the branches; k[1] and k[2] absent */
  triad_nsa_tensor v[3]; /* likewise. A k[0] that is not read (inputs' k_cmp) gets zeros */
  triad_nsa_tensor k_cmp, v_cmp; /* learned compression only */
  triad_nsa_tensor gate; /* shaped like the inputs' gate; absent if that is */
} triad_nsa_gradients;

/* gradients overwritten  <-  dout [B,T,Hq,dv] type, and options, inputs and saved as in forward; every saved field
 * is needed, but k_cmp and v_cmp for averages only. */
TRIAD_NSA_API triad_nsa_status triad_nsa_backward(triad_nsa_context*, void* stream, const triad_nsa_options*,
                                                  const triad_nsa_inputs*, const triad_nsa_saved* saved,
                                                  const triad_nsa_tensor* dout, const triad_nsa_gradients*,
                                                  void* workspace, size_t* workspace_bytes);

/* ---- part by part: compress, attend (cmp), select, attend (sel, win), combine ---- */

/* y [B,Tc,H,D] type overwritten  <-  x [B,T,H,D] type: averages. documents may be NULL everywhere. */
TRIAD_NSA_API triad_nsa_status triad_nsa_compress(triad_nsa_context*, void* stream, const triad_nsa_options*,
                                                  const triad_nsa_documents*, const triad_nsa_tensor* x,
                                                  const triad_nsa_tensor* y, void* workspace, size_t* workspace_bytes);
/* dx [B,T,H,D] type overwritten  <-  dy [B,Tc,H,D] type or acc */
TRIAD_NSA_API triad_nsa_status triad_nsa_compress_backward(triad_nsa_context*, void* stream, const triad_nsa_options*,
                                                           const triad_nsa_documents*, const triad_nsa_tensor* dy,
                                                           const triad_nsa_tensor* dx, void* workspace,
                                                           size_t* workspace_bytes);

/* block_index [B,T,Hkv,selected] i32 overwritten  <-  q [B,T,Hq,dk], k_cmp [B,Tc,Hkv,dk] type, lse_cmp [B,T,Hq] acc
 * from triad_nsa_attend(TRIAD_NSA_CMP). No gradient. */
TRIAD_NSA_API triad_nsa_status triad_nsa_select(triad_nsa_context*, void* stream, const triad_nsa_options*,
                                                const triad_nsa_documents*, const triad_nsa_tensor* q,
                                                const triad_nsa_tensor* k_cmp, const triad_nsa_tensor* lse_cmp,
                                                const triad_nsa_tensor* block_index, void* workspace,
                                                size_t* workspace_bytes);

/* o [B,T,Hq,dv] type, lse [B,T,Hq] acc overwritten  <-  q [B,T,Hq,dk], k [B,S,Hkv,dk], v [B,S,Hkv,dv] type with S = Tc
 * for branch cmp (k_cmp and v_cmp) and T for the others; block_index [B,T,Hkv,selected] i32 for branch sel, else NULL:
 * ascending, without repetitions, padded at the end with -1. */
TRIAD_NSA_API triad_nsa_status triad_nsa_attend(triad_nsa_context*, void* stream, const triad_nsa_options*,
                                                const triad_nsa_documents*, int branch, const triad_nsa_tensor* q,
                                                const triad_nsa_tensor* k, const triad_nsa_tensor* v,
                                                const triad_nsa_tensor* block_index, const triad_nsa_tensor* o,
                                                const triad_nsa_tensor* lse, void* workspace, size_t* workspace_bytes);
/* dq, dk, dv overwritten, in the shapes of q, k, v and in type or acc, dk and dv in the same; NULL: not computed
 *  <-  d_o [B,T,Hq,dv] type, o's gradient; o and lse from forward; the rest as in forward */
TRIAD_NSA_API triad_nsa_status triad_nsa_attend_backward(
    triad_nsa_context*, void* stream, const triad_nsa_options*, const triad_nsa_documents*, int branch,
    const triad_nsa_tensor* q, const triad_nsa_tensor* k, const triad_nsa_tensor* v,
    const triad_nsa_tensor* block_index, const triad_nsa_tensor* o, const triad_nsa_tensor* lse,
    const triad_nsa_tensor* d_o, const triad_nsa_tensor* dq, const triad_nsa_tensor* dk, const triad_nsa_tensor* dv,
    void* workspace, size_t* workspace_bytes);

/* out [B,T,Hq,dv] type overwritten  <-  o, an array of three [B,T,Hq,dv] type by branch; gate [B,T,H,3] type or acc,
 * H a divisor of Hq; NULL: 1/3 each. Only the options kernels and flags matter. */
TRIAD_NSA_API triad_nsa_status triad_nsa_combine(triad_nsa_context*, void* stream, const triad_nsa_options*,
                                                 const triad_nsa_tensor o[3], const triad_nsa_tensor* gate,
                                                 const triad_nsa_tensor* out, void* workspace,
                                                 size_t* workspace_bytes);
/* d_o, an array of three [B,T,Hq,dv] type by branch: gate * dout; dgate [B,T,H,3] type or acc, or NULL; overwritten
 *  <-  dout [B,T,Hq,dv] type; o and gate as in forward. A rank-0 d_o is not computed. */
TRIAD_NSA_API triad_nsa_status triad_nsa_combine_backward(triad_nsa_context*, void* stream, const triad_nsa_options*,
                                                          const triad_nsa_tensor* dout, const triad_nsa_tensor o[3],
                                                          const triad_nsa_tensor* gate, const triad_nsa_tensor d_o[3],
                                                          const triad_nsa_tensor* dgate, void* workspace,
                                                          size_t* workspace_bytes);

/* ---- block-sparse attention with one softmax, and an index that is taught to list blocks ----
 *
 *   o[t,h] = softmax attention for q[t,h] with scale `scale` over the tokens <= t in the blocks listed for (t, g)
 *   lse[t,h] = the scaled scores' natural log-sum-exp
 *
 * block_index [B,T,Hkv,n] i32, contiguous, n at least 1: the lists, from anywhere. Each is ascending, without
 * repetitions and padded at the end with -1; it may be empty, which gives o 0 and lse -inf. Block j is the tokens
 * [j*block, (j+1)*block); packed rows number blocks as triad_nsa_documents says. A block after t's own adds no tokens.
 * Other entries give undefined results: triad_nsa_check_lists finds them. block_index NULL: all tokens <= t, dense
 * causal attention. Of the options block, scale, kernels and flags matter; the others have to be valid.
 *
 * The index is a small attention with one key head for all groups: iq [B,T,Hkv,di], ik [B,T,1,di] type, di even, 2 to
 * 256, rotated like q and k if those are. Its scores are s[t,g,j] = iq[t,g] . ik[j] / sqrt(di). */

/* Copies the lists to the host, waits for the stream, and returns TRIAD_NSA_ERROR_LISTS, with the first wrong entry in
 * the message, unless they are as above and no block is after its token's own. Not allowed in a capture. */
TRIAD_NSA_API triad_nsa_status triad_nsa_check_lists(triad_nsa_context*, void* stream, const triad_nsa_options*,
                                                     const triad_nsa_documents*, const triad_nsa_tensor* block_index);

/* block_index [B,T,Hkv,selected] i32 overwritten  <-  iq, ik: the options' init_blocks first and local_blocks last
 * blocks, then complete blocks by their best token's score, the lower block first if equal. No gradient. */
TRIAD_NSA_API triad_nsa_status triad_nsa_select_by_index(triad_nsa_context*, void* stream, const triad_nsa_options*,
                                                         const triad_nsa_documents*, const triad_nsa_tensor* iq,
                                                         const triad_nsa_tensor* ik,
                                                         const triad_nsa_tensor* block_index, void* workspace,
                                                         size_t* workspace_bytes);

/* o [B,T,Hq,dv] type, lse [B,T,Hq] acc overwritten  <-  q [B,T,Hq,dk], k [B,T,Hkv,dk], v [B,T,Hkv,dv] type */
TRIAD_NSA_API triad_nsa_status triad_nsa_block_sparse_forward(
    triad_nsa_context*, void* stream, const triad_nsa_options*, const triad_nsa_documents*, const triad_nsa_tensor* q,
    const triad_nsa_tensor* k, const triad_nsa_tensor* v, const triad_nsa_tensor* block_index,
    const triad_nsa_tensor* o, const triad_nsa_tensor* lse, void* workspace, size_t* workspace_bytes);
/* dq, dk, dv overwritten, in the shapes of q, k, v and in type or acc, dk and dv in the same; NULL: not computed
 *  <-  d_o [B,T,Hq,dv] type and dlse [B,T,Hq] acc, contiguous: the gradients of o and lse; dlse NULL: 0; o and lse from
 * forward; the rest as in forward */
TRIAD_NSA_API triad_nsa_status triad_nsa_block_sparse_backward(
    triad_nsa_context*, void* stream, const triad_nsa_options*, const triad_nsa_documents*, const triad_nsa_tensor* q,
    const triad_nsa_tensor* k, const triad_nsa_tensor* v, const triad_nsa_tensor* block_index,
    const triad_nsa_tensor* o, const triad_nsa_tensor* lse, const triad_nsa_tensor* d_o, const triad_nsa_tensor* dlse,
    const triad_nsa_tensor* dq, const triad_nsa_tensor* dk, const triad_nsa_tensor* dv, void* workspace,
    size_t* workspace_bytes);

/* The index's loss, sum over all (t, g) of KL(P || Q), in nats: P is the mean over the group's heads of the attention's
 * probabilities, Q the softmax of s, both over the tokens that (t, g) attends to. P gets no gradient.
 * loss [1] f64: the sum; its mean is the sum / (B * T * Hkv). diq, dik: the gradients of weight * loss, in the shapes
 * of iq and ik and in type or acc; NULL: not computed. All overwritten  <-  q, k, block_index, and lse from forward; for
 * branch sel of triad_nsa_forward its k[1] and lse[1]. padding_begin [B] i32: each row's tokens from this one on are
 * padding, which the loss leaves out; NULL: all count */
TRIAD_NSA_API triad_nsa_status triad_nsa_index_loss(
    triad_nsa_context*, void* stream, const triad_nsa_options*, const triad_nsa_documents*, const triad_nsa_tensor* q,
    const triad_nsa_tensor* k, const triad_nsa_tensor* lse, const triad_nsa_tensor* block_index,
    const triad_nsa_tensor* iq, const triad_nsa_tensor* ik, const triad_nsa_tensor* padding_begin, double weight,
    const triad_nsa_tensor* loss, const triad_nsa_tensor* diq, const triad_nsa_tensor* dik, void* workspace,
    size_t* workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
