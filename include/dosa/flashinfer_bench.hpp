// A definition of FlashInfer-Bench in its own terms, for host memory.
#pragma once

#include "dosa/result.hpp"
#include "dosa/tensor.hpp"

namespace dosa {

/// `dsa_topk_indexer_fp8_h64_d128_topk2048_ps64`, in destination-passing style: the 2048 best keys of every sequence.
///
/// q_index_fp8        f8_e4m3 [batch_size, 64, 128]
/// k_index_cache_fp8  bytes, viewed as f8_e4m3 [num_pages, 64, 1, 132]; a page is planar: keys, then f32 scales
/// weights            f32 [batch_size, 64]
/// seq_lens           i32 [batch_size]; 0 or less gives a row of -1
/// block_table        i32 [batch_size, max_num_pages]
/// topk_indices       i32 [batch_size, 2048], written: block_table[p / 64] * 64 + p % 64 for position p, best first,
/// then -1
///
/// Ownership: nothing is kept. Thread rule: calls may run at once on different outputs.
/// Errors, before anything is written: invalid_argument, unsupported_shape, memory_budget.
/// Cost: one step of decoding without recent winners, and the allocation of its workspace.
/// Source: FlashInfer-Bench, definitions of dsa_paged.
Result<void> dsa_topk_indexer_fp8_h64_d128_topk2048_ps64(const TensorView& q_index_fp8,
                                                         const TensorView& k_index_cache_fp8, const TensorView& weights,
                                                         const TensorView& seq_lens, const TensorView& block_table,
                                                         const MutableTensorView& topk_indices);

}  // namespace dosa
