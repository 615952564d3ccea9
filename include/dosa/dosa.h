/* C interface: the verbs of indexer.hpp over plain pointers.
 *
 *   dosa_options options = dosa_default_options();
 *   dosa_indexer* indexer;
 *   dosa_plan* plan;
 *   if (dosa_indexer_create(&options, &indexer) != DOSA_OK) puts(dosa_last_error());
 *   dosa_plan_create(indexer, &shape, &plan);
 *   void* workspace = aligned_alloc(64, dosa_plan_workspace_bytes(plan));
 *   dosa_run(indexer, plan, &problem, &selection, workspace, dosa_plan_workspace_bytes(plan), NULL, NULL);
 *
 * Structs grow at their end only, between minor versions too. Each starts with `size`, set by the caller to sizeof the
 * struct that it was compiled with. Every array argument is a strided view; views own nothing.
 */
#ifndef DOSA_DOSA_H_
#define DOSA_DOSA_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define DOSA_API __attribute__((visibility("default")))
#else
#define DOSA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a caller that was compiled against an older header would no longer work. */
#define DOSA_ABI_VERSION 3

/* What a call came to. Anything but DOSA_OK leaves a message for dosa_last_error. */
typedef enum dosa_status {
  DOSA_OK = 0,
  DOSA_INVALID_ARGUMENT = 1,   /* a pointer, dtype, shape, stride or option is wrong */
  DOSA_UNSUPPORTED_SHAPE = 2,  /* legal, but outside what this backend computes */
  DOSA_UNSUPPORTED_DEVICE = 3, /* the backend, instruction set or GPU is not available here */
  DOSA_WORKSPACE_TOO_SMALL = 4,
  DOSA_MEMORY_BUDGET = 5,       /* the smallest workspace is larger than options.memory_budget */
  DOSA_VERIFICATION_FAILED = 8, /* options.verify_rows found a difference: a bug of dosa */
  DOSA_OUT_OF_MEMORY = 100,     /* the host has no memory left for a handle */
  DOSA_INTERNAL = 101           /* a bug of dosa */
} dosa_status;

typedef enum dosa_dtype { DOSA_F8_E4M3 = 0, DOSA_BF16 = 1, DOSA_F32 = 2, DOSA_I32 = 3 } dosa_dtype;
typedef enum dosa_device { DOSA_CPU = 0, DOSA_CUDA = 1 } dosa_device; /* also the backends */
typedef enum dosa_method {
  DOSA_METHOD_AUTO = 0,
  DOSA_METHOD_DENSE = 1,
  DOSA_METHOD_FUSED = 2,
  DOSA_METHOD_DOSA = 3
} dosa_method;
typedef enum dosa_form {
  DOSA_FORM_AUTO = 0,
  DOSA_FORM_BASE = 1,
  DOSA_FORM_ABSOLUTE = 2,
  DOSA_FORM_EXTENDED = 3
} dosa_form;
typedef enum dosa_seeds {
  DOSA_SEEDS_AUTO = 0,
  DOSA_SEEDS_NEAREST_SPREAD = 1,
  DOSA_SEEDS_CHAIN = 2,
  DOSA_SEEDS_LARGEST_BOUNDS = 3,
  DOSA_SEEDS_SAMPLE = 4
} dosa_seeds;
typedef enum dosa_precision { DOSA_PRECISION_AUTO = 0, DOSA_PRECISION_F32 = 1, DOSA_PRECISION_I8 = 2 } dosa_precision;
typedef enum dosa_order { DOSA_ORDER_SCORE = 0, DOSA_ORDER_ASCENDING = 1 } dosa_order;
typedef enum dosa_index_space { DOSA_IDS_ABSOLUTE = 0, DOSA_IDS_RELATIVE = 1, DOSA_IDS_SLOT = 2 } dosa_index_space;

/* A strided view. `data` points at element [0, 0, ...]; strides count elements and may be anything. rank 0: absent. */
typedef struct dosa_tensor {
  const void* data;
  int32_t dtype;    /* dosa_dtype; uint8 arrays are viewed as DOSA_F8_E4M3 */
  int32_t device;   /* dosa_device */
  int32_t rank;     /* 0..5 */
  int32_t reserved; /* 0 */
  int64_t shape[5];
  int64_t stride[5];
} dosa_tensor;

/* How it is computed; see options.hpp for every field. Start from dosa_default_options. */
typedef struct dosa_options {
  size_t size;
  int32_t method;             /* dosa_method */
  int32_t backend;            /* dosa_device */
  int32_t form;               /* dosa_form */
  int32_t row_budget;         /* bound rows of a certificate; 0: chosen from the data */
  int32_t aggregates;         /* 1..4; 0: chosen from the data */
  int32_t precision;          /* dosa_precision */
  int32_t seeds;              /* dosa_seeds */
  int32_t order;              /* dosa_order */
  int32_t index_space;        /* dosa_index_space */
  int32_t threads;            /* 0: one per CPU this process may use */
  const char* implementation; /* of the CPU kernels, by name; NULL: the fastest. Copied */
  int64_t memory_budget;      /* largest workspace, in bytes */
  int64_t min_context;        /* method auto scores rows in full that see fewer keys; 0: derived from topk */
  int64_t verify_rows;        /* debug mode: recompute this many rows in full and compare; 0: off */
  int32_t time_stages;        /* 1: cuda times its stages and waits for the stream; cpu always times */
  int32_t reserved;           /* 0 */
} dosa_options;

/* The part of a problem that fixes a plan. */
typedef struct dosa_shape {
  size_t size;
  int64_t nq, nk;
  int32_t heads; /* 1..128 */
  int32_t dim;   /* 32, 64 or 128 */
  int32_t topk;  /* 1..4096 */
  int32_t page_size; /* keys of a page: 16, 32, 64, 128 or 256, with nk = max_blocks * page_size; 0: keys are contiguous */
  int64_t requests;  /* rows of block_table; ignored where keys are contiguous */
} dosa_shape;

/* score(i) = k_scale_i * sum_h w_h * max(q_h . k_i, 0). Query j may select keys max(ks_j, 0) <= i < min(ke_j, nk). */
typedef struct dosa_problem {
  size_t size;
  dosa_tensor q;       /* f8_e4m3 [nq, heads, dim] */
  dosa_tensor k;       /* f8_e4m3 [nk, dim] */
  dosa_tensor k_scale; /* f32 [nk] */
  dosa_tensor w;       /* f32 [nq, heads] */
  dosa_tensor ks;      /* i32 [nq]; absent: 0 */
  dosa_tensor ke;      /* i32 [nq] or [nq / n, n]; absent: nk */
  dosa_tensor hints;   /* i32 [nq, m], [requests, m] or [1, m], likely winners, any values; absent: none */
  int32_t topk;
  int32_t reserved; /* 0 */
  /* Keys in pages, instead of k and k_scale; see problem.hpp for the layout of a page. */
  dosa_tensor kv_cache;    /* f8_e4m3 [pages, page_size, 1, dim + 4]; the page stride is free, a multiple of 4 */
  dosa_tensor block_table; /* i32 [requests, max_blocks] */
  dosa_tensor requests;    /* i32 [nq], the row of block_table that a query reads; absent: nq / requests queries each */
} dosa_problem;

/* Where results go: exactly min(visible, topk) valid ids, then -1 with score -inf. May not overlap anything else. */
typedef struct dosa_selection {
  size_t size;
  dosa_tensor ids;    /* i32 [nq, topk]; written through although `data` points to const */
  dosa_tensor scores; /* f32 [nq, topk]; absent: not wanted */
  dosa_tensor recent; /* i32 [requests, m], recent winners of every request, read as hints and then brought up to date; any
                         contents; unit stride along a row; written through. See result.hpp. Absent: not wanted */
} dosa_selection;

/* One step of decoding: draft token j of request b sees the positions below context_lens[b, j]. See decode.hpp. */
typedef struct dosa_decode_step {
  size_t size;
  dosa_tensor q;            /* f8_e4m3 [B, next_n, heads, dim], next_n 1..8 */
  dosa_tensor w;            /* f32 [B * next_n, heads] */
  dosa_tensor kv_cache;     /* as in dosa_problem */
  dosa_tensor block_table;  /* i32 [B, max_blocks] */
  dosa_tensor context_lens; /* i32 [B, next_n] */
  int32_t topk;
} dosa_decode_step;

/* How the scale of a quantised key is chosen: max(amax, floor) / 448, or that rounded up to a power of two. */
typedef enum dosa_scale_rule { DOSA_SCALE_AMAX = 0, DOSA_SCALE_POWER_OF_TWO = 1 } dosa_scale_rule;

/* What a run took; counts are of query-key pairs where nothing else is said. See result.hpp. */
typedef struct dosa_stats {
  size_t size;
  int64_t rows, clamped_rows;
  int64_t rows_empty, rows_short, rows_dosa, rows_full, rows_full_context, rows_full_loose, rows_full_exempt;
  int64_t visible, seeds, screened, survivors, refined, full;
  int64_t exempt_keys;
  double predicted_work; /* relative to full scoring, summed over planned_rows */
  double planned_rows;
  double seconds_seed, seconds_certify, seconds_screen, seconds_refine, seconds_select, seconds_score; /* by stage */
} dosa_stats;

typedef struct dosa_indexer dosa_indexer;
typedef struct dosa_plan dosa_plan;

/* DOSA_ABI_VERSION of the library, and its version as text ("0.1.0"; static). */
DOSA_API int32_t dosa_abi_version(void);
DOSA_API const char* dosa_version(void);

/* Message of the calling thread's last call that did not return DOSA_OK: one line with the value seen and what is
 * allowed. Valid until that thread's next such call. Never NULL. */
DOSA_API const char* dosa_last_error(void);

/* "" if the backend can run here, else the reason why not. Valid until the calling thread's next call of this. */
DOSA_API const char* dosa_unavailable_reason(int32_t backend);

/* Name of the CPU implementation of that index, fastest first; NULL past the last. Valid until the calling thread's
 * next call of this. */
DOSA_API const char* dosa_cpu_implementation(int32_t index);

/* Every field at its default, `size` set. */
DOSA_API dosa_options dosa_default_options(void);

/* Makes an indexer. options: NULL for the defaults; copied.
 * Ownership: the caller destroys *indexer. Thread rule: an indexer serves one thread at a time.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED_DEVICE, OUT_OF_MEMORY. */
DOSA_API dosa_status dosa_indexer_create(const dosa_options* options, dosa_indexer** indexer);
/* NULL is ignored. Plans made from the indexer must be destroyed first. */
DOSA_API void dosa_indexer_destroy(dosa_indexer* indexer);

/* Fixes every size of a run.
 * Ownership: the caller destroys *plan, before the indexer. Thread rule: a plan is never changed and may be shared.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED_SHAPE, MEMORY_BUDGET, OUT_OF_MEMORY. Cost: microseconds. */
DOSA_API dosa_status dosa_plan_create(const dosa_indexer* indexer, const dosa_shape* shape, dosa_plan** plan);
/* NULL is ignored. */
DOSA_API void dosa_plan_destroy(dosa_plan* plan);
/* Bytes of workspace that dosa_run needs. */
DOSA_API size_t dosa_plan_workspace_bytes(const dosa_plan* plan);
/* One line that a person can read; lives as long as the plan. */
DOSA_API const char* dosa_plan_describe(const dosa_plan* plan);

/* Writes every row of `selection`.
 * workspace: 64-byte aligned, contents before and after unspecified, in the backend's memory. stats: may be NULL.
 * stream: a cudaStream_t; cuda enqueues its work there and does not wait, so `stats` holds what the host knows (dosa_counters
 * has the rest). Ignored by the cpu backend, which is done when the call returns. Allocates nothing, keeps nothing.
 * Errors leave the output untouched, except VERIFICATION_FAILED: INVALID_ARGUMENT, WORKSPACE_TOO_SMALL. */
DOSA_API dosa_status dosa_run(const dosa_indexer* indexer, const dosa_plan* plan, const dosa_problem* problem,
                              const dosa_selection* selection, void* workspace, size_t workspace_bytes, void* stream,
                              dosa_stats* stats);

/* What the last run on this workspace counted, seconds aside. cuda: waits for the stream. cpu: zeros, dosa_run has told it.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED_DEVICE. */
DOSA_API dosa_status dosa_counters(const dosa_indexer* indexer, const dosa_plan* plan, void* workspace,
                                   size_t workspace_bytes, void* stream, dosa_stats* stats);

/* Fills *problem (its size set) with views of the step's arrays: row b * next_n + j is draft token j of request b.
 * Errors: INVALID_ARGUMENT. */
DOSA_API dosa_status dosa_decode_problem(const dosa_decode_step* step, dosa_problem* problem);

/* Keys in pages of host memory; see pages.hpp. kv_cache, from and to are f8_e4m3 [pages, page_size, 1, dim + 4], a slot is
 * page * page_size + offset, slots are i32 [n] and a negative one skips its key. Outputs are written through although `data`
 * points to const. Nothing is written if an argument is wrong: INVALID_ARGUMENT, UNSUPPORTED_SHAPE.
 *
 * insert: quantises keys f32 or bf16 [n, dim] into slots.
 * gather: positions [first, first + n) of the request whose row of the block table is `blocks`, to k f8_e4m3 [n, dim] and
 * k_scale f32 [n].
 * move: from slots to slots, bit for bit, in their order; both pools may be one. */
DOSA_API dosa_status dosa_insert_keys(const dosa_tensor* kv_cache, const dosa_tensor* keys, const dosa_tensor* slots,
                                      int32_t scale_rule, float floor);
DOSA_API dosa_status dosa_gather_keys(const dosa_tensor* kv_cache, const dosa_tensor* blocks, int64_t first,
                                      const dosa_tensor* k, const dosa_tensor* k_scale);
DOSA_API dosa_status dosa_move_keys(const dosa_tensor* from, const dosa_tensor* from_slots, const dosa_tensor* to,
                                    const dosa_tensor* to_slots);

/* FlashInfer-Bench's definition in destination-passing style, host memory; see flashinfer_bench.hpp for the shapes.
 * Errors, before anything is written: INVALID_ARGUMENT, UNSUPPORTED_SHAPE, MEMORY_BUDGET. */
DOSA_API dosa_status dosa_dsa_topk_indexer_fp8_h64_d128_topk2048_ps64(
    const dosa_tensor* q_index_fp8, const dosa_tensor* k_index_cache_fp8, const dosa_tensor* weights,
    const dosa_tensor* seq_lens, const dosa_tensor* block_table, const dosa_tensor* topk_indices);

#ifdef __cplusplus
}
#endif

#endif /* DOSA_DOSA_H_ */
