/*
 * dhp_fa.h - the C ABI of dhp_safe_fa.
 *
 * Scaled dot product attention whose hardware profile says nothing about the data:
 *
 *     out[b,h,i,:] = sum_j softmax_j(scale * <q[b,h,i,:], k[b,h/G,j,:]>) * v[b,h/G,j,:],   G = Hq / Hk
 *     lse[b,h,i]   = log sum_j exp(scale * <q[b,h,i,:], k[b,h/G,j,:]>)
 *
 * over the keys j that query i may see: all, or (causal) j <= i + causal_offset, or those in a window around
 * i + causal_offset.
 *
 * Public: everything in these structs (pointers, sizes, strides, dtypes, flags, scale). Secret: what the
 * pointers of q, k, v and sinks lead to. Plain structs, no torch type, no CUDA type; no function keeps a pointer
 * after it returns, except that a CUDA launch reads and writes the tensors until the stream has run it.
 *
 * Errors are values: a function that can fail returns a dhp_status and, if the caller gave a dhp_error,
 * one sentence that names the argument, what was given and what is supported. After any but
 * DHP_DRIVER_ERROR no output element has been written; a call of several kernels, of which the driver
 * refused a later one, may have written some.
 */
#ifndef DHP_FA_H
#define DHP_FA_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define DHP_API
#else
#define DHP_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dhp_dtype {
  DHP_FLOAT32 = 0,
  DHP_FLOAT16 = 1,
  DHP_BFLOAT16 = 2,
  DHP_FLOAT64 = 3 /* on the CPU only: to check gradients by differences */
} dhp_dtype;

typedef enum dhp_status {
  DHP_OK = 0,
  DHP_INVALID_ARGUMENT = 1, /* no implementation could accept it */
  DHP_UNSUPPORTED = 2,      /* meaningful, but outside what this build serves */
  DHP_OUT_OF_MEMORY = 3,    /* host memory for a scratch tile */
  DHP_NO_GPU = 4,           /* no driver, no Hopper GPU, or a build without kernels */
  DHP_DRIVER_ERROR = 5      /* the CUDA driver refused a call; the text carries its name */
} dhp_status;

/* Large enough for one sentence with four shapes in it; longer text is cut, never overrun. */
typedef struct dhp_error {
  char text[512];
} dhp_error;

/* A strided tensor of rank 4, [B, H, S, D]; strides count elements. stride[3] is 1 wherever size[3] > 1. */
typedef struct dhp_tensor {
  void *data;
  int64_t size[4];
  int64_t stride[4];
  dhp_dtype dtype;
} dhp_tensor;

/* One attention call. */
typedef struct dhp_attention {
  dhp_tensor q;          /* [B, Hq, Sq, D] */
  dhp_tensor k;          /* [B, Hk, Sk, D], Hk divides Hq: query head h reads key head h / (Hq / Hk) */
  dhp_tensor v;          /* [B, Hk, Sk, Dv]; on CUDA Dv = D */
  dhp_tensor out;        /* [B, Hq, Sq, Dv]; a row that sees no key becomes 0 */
  void *lse;             /* [B, Hq, Sq] contiguous float32 (float64 where q is), natural logarithm, -inf where no key
                            is seen; NULL: not wanted */
  double scale;          /* 0 to 2^100, so that 2^27 is left for a score in float32 */
  int is_causal;         /* 0: every key is visible; 1: key j is visible to query i iff j <= i + causal_offset */
  int64_t causal_offset; /* 0 is torch SDPA's alignment, Sk - Sq is FlashAttention's */
  int is_windowed; /* 1: key j is visible to query i only if -window_left <= j - i - causal_offset <= window_right */
  int64_t window_left, window_right; /* >= 0; -1: no bound on that side */
  double softcap;    /* > 0: softcap tanh(score / softcap) takes the place of each (scaled) score; 0: none. But for
                        float64, neither it nor scale / softcap is more than 2^100 */
  const void *sinks; /* [Hq] contiguous, dtype as lse: exp(sink) is one more term of the sum of every row of a head,
                        with a value of 0. A row that sees no key has the sink as its lse. NULL: none */
  void *workspace;   /* dhp_attention_workspace bytes, 16-byte aligned, if that is not 0; holds secrets afterwards */
} dhp_attention;

/*
 * Attention within each of many sequences, packed: query rows of sequence b are [cu_seqlens_q[b], cu_seqlens_q[b + 1])
 * of `packed`, its keys begin at cu_seqlens_k[b]. A row of out and lse has the bits of a call for its sequence alone.
 * Rows behind the last sequence belong to none and become 0, their lse -inf.
 *
 * With a page_table k and v are a cache in pages, [pages, Hk, page_size, D], of 16, 32, 64, 128 or 256 keys: key j of
 * sequence b is row j % page_size of page page_table[b][j / page_size]. Pages may come in any order and be shared. Only
 * entries of keys that count are read. One that names no page is refused, or, where a host cannot look at the table,
 * followed nowhere.
 */
typedef struct dhp_varlen {
  dhp_attention packed; /* q, out [1, Hq, tokens, D]; k, v [1, Hk, tokens, D]; lse [Hq, tokens]; no causal_offset */
  int64_t sequences;
  const int32_t *cu_seqlens_q, *cu_seqlens_k; /* [sequences + 1]; from 0 on, ascending, no more than there are rows */
  const int32_t *seqused_k;                   /* [sequences]: only so many keys count; NULL: all */
  const int32_t *leftpad_k;                   /* [sequences]: so many of these do not, the first ones; NULL: 0 */
  const int32_t *page_table;                  /* [sequences, page_table_width], in place of cu_seqlens_k; or NULL */
  int64_t page_table_width;
  int64_t max_seqlen_q, max_seqlen_k; /* no sequence has more rows, or keys that count */
  int is_bottom_right; /* where query i stands: 0: at key i; 1: so that the last query stands at the last key */
  void *workspace;     /* dhp_varlen_workspace bytes of device memory, 16-byte aligned; holds secrets afterwards */
} dhp_varlen;

/*
 * The gradients of one attention call, given those of its results:
 *
 *     P = exp(scale q k^T - lse),  delta = rowsum(grad_out * out) - grad_lse,  dS = P * (grad_out v^T - delta),
 *     dv = P^T grad_out,  dq = scale dS k,  dk = scale dS^T q,
 *
 * with a soft cap dS also times its slope, 1 - (capped score / softcap)^2. Sinks are in lse and out already, and are
 * not looked at; dhp_sinks_backward is about theirs. dk and dv summed over the query heads of a key head. Secret
 * besides q, k and v: out, lse, grad_out, grad_lse.
 */
typedef struct dhp_backward {
  dhp_attention forward; /* the call as it was made; its out and lse, both needed, are read */
  dhp_tensor grad_out;   /* [B, Hq, Sq, Dv] */
  const void *grad_lse;  /* as lse; NULL: zero */
  dhp_tensor dq, dk, dv; /* shapes of q, k, v; data NULL: not wanted */
  void *workspace;       /* dhp_backward_workspace bytes, 16-byte aligned; holds secrets afterwards */
} dhp_backward;

/*
 * The gradients of a call of packed sequences. A row of them has the bits of a call for its sequence alone; rows behind
 * the last sequence, and keys that do not count, have gradient 0. Of a cache in pages there are none.
 */
typedef struct dhp_varlen_backward {
  dhp_varlen forward;    /* the call as it was made; its out and lse, both needed, are read */
  dhp_tensor grad_out;   /* [1, Hq, tokens, D] */
  const void *grad_lse;  /* as lse; NULL: zero */
  dhp_tensor dq, dk, dv; /* shapes of q, k, v; data NULL: not wanted */
} dhp_varlen_backward;

/*
 * The gradient of the sinks of a call, or of a packed one as a batch of one, given those of its results:
 *
 *     dsinks[h] = sum_b,i exp(sinks[h] - lse[b,h,i]) * (grad_lse - rowsum(grad_out * out))[b,h,i]
 *
 * over all rows, also those that see no key. A row whose lse is -inf has not even the sink as a term, and adds 0,
 * whatever else it holds: no sinks of -inf, and no row of a packed call that belongs to no sequence, make a NaN.
 * Secret: what all pointers lead to.
 */
typedef struct dhp_sinks_backward {
  dhp_tensor out, grad_out;   /* [B, Hq, Sq, Dv] */
  const void *lse, *grad_lse; /* [B, Hq, Sq] contiguous float32 (float64 where out is); grad_lse NULL: zero */
  const void *sinks;          /* [Hq] contiguous, dtype as lse */
  void *dsinks;               /* as sinks */
} dhp_sinks_backward;

/* Runs body(ctx, first, last) over a partition of [0, count), possibly in parallel, and returns when all is done. */
typedef struct dhp_executor {
  void (*run)(void *self, int64_t count, void (*body)(void *ctx, int64_t first, int64_t last), void *ctx);
  void *self;
} dhp_executor;

/* ---- checking --------------------------------------------------------------------------------------------------- */

/*
 * Everything that dhp_attention_cpu or _cuda would refuse by shape, dtype, flag or scale, before any memory is spent on
 * outputs or copies. Looks at no data pointer, and at no stride but the last.
 */
DHP_API dhp_status dhp_attention_check(const dhp_attention *args, int on_cuda, dhp_error *error);
/* The same of dhp_backward_cpu and _cuda. */
DHP_API dhp_status dhp_backward_check(const dhp_backward *args, int on_cuda, dhp_error *error);
/* The same of dhp_sinks_backward_cpu. On CUDA there are no sinks. */
DHP_API dhp_status dhp_sinks_backward_check(const dhp_sinks_backward *args, int on_cuda, dhp_error *error);

/* The same of dhp_varlen_cpu and _cuda, but for what the lengths themselves say, which is found when they run. */
DHP_API dhp_status dhp_varlen_check(const dhp_varlen *args, int on_cuda, dhp_error *error);
/* The same of dhp_varlen_backward_cpu. */
DHP_API dhp_status dhp_varlen_backward_check(const dhp_varlen_backward *args, int on_cuda, dhp_error *error);

/* ---- running --------------------------------------------------------------------------------------------------- */

/*
 * On the CPU: float32, float16 or bfloat16, D <= 256, float32 accumulation; float64 in float64. executor NULL runs in
 * the calling thread. CT: time and addresses depend on shapes, strides, flags and the executor alone.
 */
DHP_API dhp_status dhp_attention_cpu(const dhp_attention *args, const dhp_executor *executor, dhp_error *error);

DHP_API dhp_status dhp_backward_cpu(const dhp_backward *args, const dhp_executor *executor, dhp_error *error);

/*
 * Rows of a head are added up in an order that B and Sq alone decide. CT: time and addresses depend on shapes, strides,
 * dtype, which pointers are NULL and the executor alone.
 */
DHP_API dhp_status dhp_sinks_backward_cpu(const dhp_sinks_backward *args, const dhp_executor *executor,
                                          dhp_error *error);

/* Lengths are public, and are checked before anything is written. */
DHP_API dhp_status dhp_varlen_cpu(const dhp_varlen *args, const dhp_executor *executor, dhp_error *error);
DHP_API dhp_status dhp_varlen_backward_cpu(const dhp_varlen_backward *args, const dhp_executor *executor,
                                           dhp_error *error);

/*
 * On a Hopper GPU: float16 or bfloat16, D a multiple of 8 up to dhp_cuda_max_head_dim(). Enqueued on stream (a
 * CUstream of that device, NULL for the default one); returns without waiting. Capturable in a CUDA graph.
 * CT: as for the CPU; the device code's contract is in audits/SOUNDNESS.md.
 */
DHP_API dhp_status dhp_attention_cuda(const dhp_attention *args, int device, void *stream, dhp_error *error);
DHP_API dhp_status dhp_backward_cuda(const dhp_backward *args, int device, void *stream, dhp_error *error);
/*
 * Lengths and page table lie in device memory and are read there: a captured graph may be replayed as they grow, within
 * what the shapes, max_seqlen_q and max_seqlen_k allow. What dhp_varlen_cpu would refuse of them makes rows NaN: all
 * rows if cu_seqlens_q is wrong, else those of the sequence whose keys or pages there are not; nothing else is read or
 * written.
 */
DHP_API dhp_status dhp_varlen_cuda(const dhp_varlen *args, int device, void *stream, dhp_error *error);
/*
 * Bytes of device memory that dhp_attention_cuda needs beside the tensors: 0 for rows whose keys are all of one segment
 * (docs/kernel.md), else a float32 copy of the rows of all CTAs, or of the output for each segment. 0 on the CPU.
 */
DHP_API size_t dhp_attention_workspace(const dhp_attention *args, int on_cuda);
/* The same of dhp_varlen_cuda, by max_seqlen_k; and 64 for each tile of queries. */
DHP_API size_t dhp_varlen_workspace(const dhp_varlen *args, int on_cuda);
/*
 * Bytes of device memory that dhp_backward_cuda needs beside the tensors: two floats a query row; where one pass
 * computes dq, also a float32 copy of it and the bounds of keys (docs/kernel-backward.md). 0 on the CPU.
 */
DHP_API size_t dhp_backward_workspace(const dhp_backward *args, int on_cuda);

/*
 * 1 if the GPU kernel can read or write this tensor in place: 16-byte aligned data, strides that are multiples of 16
 * bytes. 0: the caller has to hand over a contiguous copy.
 */
DHP_API int dhp_cuda_layout_supported(const dhp_tensor *tensor);

/* ---- looking --------------------------------------------------------------------------------------------------- */

/* One shipped GPU kernel: exactly one cubin (sm_90a machine code, no PTX). */
typedef struct dhp_kernel_info {
  const char *name;         /* file name of the cubin without its ending; also says its constants */
  const char *family;       /* folder of csrc/families that holds its source and its host code */
  const char *entry;        /* name of the function in the cubin */
  const char *part;         /* which results of a call it computes: "out"; "window out", where a window hides the first
                               keys; "packed out", with " sinks" or " softcap" behind it for calls of these, and
                               "tiles"; "delta"; "dk dv", "dk", "dv" or "dq"; "bounds", "dq dk dv" and "dq out" */
  const char *cubin_sha256; /* 64 hexadecimal digits */
  const void *cubin;
  size_t cubin_size;
  dhp_dtype dtype;
  int head_dim;       /* largest D it serves; smaller ones by zero fill */
  int warpgroups;     /* of 128 threads */
  int rows;           /* of a warpgroup: query rows, or keys where it computes dk or dv */
  int tile_q, tile_k; /* rows of a CTA, of these; keys (or query rows) of a step */
  int stages;         /* places for tiles of K and of V in shared memory */
  int ctas_per_sm;
  int step_cycles;   /* about; of a multiprocessor full of such CTAs, for one step of each */
  int unit_cycles;   /* about; of a decode kernel beside its steps; else 0 */
  int segment_tiles; /* key tiles of a segment of a row; of a decode kernel, of all that it has room for; else 0 */
  int is_short;      /* 1: of a forward kernel that computes rows whose keys are in one segment, and no others */
  int cluster;       /* CTAs that compute the same rows, each its columns; 1: of all kernels but decode's */
  int threads, shared_bytes; /* per CTA */
  int registers;             /* per thread, as ptxas reports */
  int spill_bytes;
} dhp_kernel_info;

/* What a call of the forward will launch; a function of public shape alone. */
typedef struct dhp_plan {
  const dhp_kernel_info *kernel; /* NULL: nothing to launch (an empty output) */
  int64_t grid;                  /* CTAs; every round of items is one for each, or for each cluster */
  int heads_per_tile;            /* query heads of one key head that share a tile, a head group: a power of two */
  int64_t q_tiles;               /* query tiles along Sq */
  int mirrored;          /* 1: two head groups in order share q_tiles items of two tiles; 0: an item is a tile */
  int64_t listed_groups; /* the last head groups, dealt tile by tile, longest first; the others in order */
  int64_t items;         /* of all head groups */
  int splits;            /* key segments whose work goes to different CTAs or clusters, to be folded; 1: none */
  int64_t parts;         /* rows that the workspace has to hold */
} dhp_plan;

/*
 * What a call of packed sequences will launch after the kernel that lists their query tiles; a function of public shape
 * alone, not of the lengths in device memory.
 */
typedef struct dhp_packed_plan {
  const dhp_kernel_info *kernel; /* NULL: nothing to launch */
  int heads_per_tile;            /* query heads of one key head that share a tile, a head group: a power of two */
  int64_t rows, entries;         /* query rows of a tile; of the list, no fewer than there are query tiles */
  int64_t items, grid;           /* entries for every head group; CTAs */
  int64_t parts;                 /* rows that the workspace has to hold beside the list */
} dhp_packed_plan;

/* A kernel and how many CTAs of it. */
typedef struct dhp_launch {
  const dhp_kernel_info *kernel;
  int64_t grid;
} dhp_launch;

/* What a backward will launch, in this order; a function of public shape and of which gradients are wanted. */
typedef struct dhp_backward_plan {
  int count;
  dhp_launch launches[4]; /* delta, and at most one for each gradient; or bounds, delta, all gradients' and dq's out */
} dhp_backward_plan;

DHP_API int dhp_kernel_count(void); /* 0 in a build without nvcc */
DHP_API const dhp_kernel_info *dhp_kernel(int index);
DHP_API int dhp_cuda_max_head_dim(void);
DHP_API dhp_status dhp_plan_attention(const dhp_attention *args, dhp_plan *plan, dhp_error *error);
/* The shapes agree already (dhp_varlen_check). */
DHP_API dhp_status dhp_plan_packed(const dhp_varlen *args, dhp_packed_plan *plan, dhp_error *error);
DHP_API dhp_status dhp_plan_backward(const dhp_backward *args, dhp_backward_plan *plan, dhp_error *error);

#ifdef __cplusplus
}
#endif

#endif
