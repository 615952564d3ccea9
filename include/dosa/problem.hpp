// What is asked: indexer activations, visible ranges, and how many keys each query may keep.
#pragma once

#include <cstdint>

#include "dosa/tensor.hpp"

namespace dosa {

/// One selection problem, as DeepGEMM's `fp8_mqa_logits` (contiguous keys) or `fp8_paged_mqa_logits` (pages) takes it.
///
///   x_h(i) = q_h . k_i                                 raw FP8 components, no scale
///   score(i) = k_scale_i * sum_h w_h * max(x_h(i), 0)
///
/// Query j may select the keys i with max(ks_j, 0) <= i < min(ke_j, nk). Non-finite data is legal: a NaN dot counts as 0,
/// anything else reaches the score; a NaN score ranks below -inf. The arrays are only read, and only during a call.
///
/// Keys are contiguous (k and k_scale), or in pages (kv_cache and block_table), as serving engines hold them. A page is
/// planar whatever its nominal shape says: page_size x dim bytes of keys, then page_size f32 scales. Key i of a request is
/// key i % page_size of the page that entry i / page_size of the request's row of the table names, so nk, the keys that a
/// row has room for, is max_blocks * page_size. Entries behind the visible keys may hold anything. A page may be listed
/// twice: its keys then are different keys with equal scores.
struct Problem {
  TensorView q;        ///< f8_e4m3 [nq, heads, dim]
  TensorView k;        ///< f8_e4m3 [nk, dim]
  TensorView k_scale;  ///< f32 [nk]
  TensorView w;        ///< f32 [nq, heads], signed; query scale, softmax scale and heads^-1/2 folded in by the caller
  TensorView ks;       ///< i32 [nq], first visible key; absent: 0
  TensorView ke;       ///< i32 [nq] or [nq / n, n] (context lengths per draft token), one past the last visible key; absent: nk
  TensorView hints;    ///< i32 [nq, m], [requests, m] or [1, m], likely winners (absolute ids); any values; absent: none.
                           ///< The cuda backend looks at them where it decodes: at most 8 queries a request, keys in pages
  TensorView kv_cache;     ///< f8_e4m3 (uint8) [pages, page_size, 1, dim + 4], page_size 16, 32, 64, 128 or 256. Only the
                           ///< page stride is free: a multiple of 4 bytes, so that layers may share a pool
  TensorView block_table;  ///< i32 [requests, max_blocks], page ids
  TensorView requests;     ///< i32 [nq], the row of block_table that a query reads; absent: nq / requests queries each
  std::int32_t topk = 2048;  ///< keys to keep per query, 1..4096
};

/// The part of a Problem that fixes a plan.
struct ProblemShape {
  std::int64_t nq = 0;
  std::int64_t nk = 0;
  std::int32_t heads = 0;  ///< 1..128
  std::int32_t dim = 128;  ///< 32, 64 or 128
  std::int32_t topk = 2048;
  std::int64_t requests = 1;   ///< rows of the block table; 1 where keys are contiguous
  std::int32_t page_size = 0;  ///< keys of a page; 0 where keys are contiguous

  friend bool operator==(const ProblemShape&, const ProblemShape&) = default;
};

}  // namespace dosa
