// Decoding: one step of a batch of requests, and what is carried from step to step.
//
//   auto problem = dosa::decode_problem({q, w, kv_cache, block_table, context_lens, 2048});
//   auto plan = indexer->plan(dosa::shape_of(*problem));    // once; lengths may change from step to step
//   indexer->run(*plan, *problem, {ids, scores, recent});   // recent i32 [B, m], -1 at first: see Selection
//
// The caller owns `recent`: a row is one request's. Rows may be filled with -1 (dropped), moved with their requests,
// copied to a request that branches off, or shared. They speed steps up and change no result.
#pragma once

#include <cstdint>

#include "dosa/problem.hpp"
#include "dosa/result.hpp"

namespace dosa {

/// One step, as DeepGEMM's `fp8_paged_mqa_logits` takes it. Draft token j of request b sees the positions below
/// context_lens[b, j]; a length of 0 or less gives a row of -1.
struct DecodeStep {
  TensorView q;             ///< f8_e4m3 [B, next_n, heads, dim], next_n 1..8
  TensorView w;             ///< f32 [B * next_n, heads]
  TensorView kv_cache;      ///< as in Problem
  TensorView block_table;   ///< i32 [B, max_blocks]
  TensorView context_lens;  ///< i32 [B, next_n]
  std::int32_t topk = 2048;
};

/// The step as a Problem: row b * next_n + j is draft token j of request b.
/// Ownership: the Problem views the same arrays. Thread rule: none, it reads no data.
/// Errors: invalid_argument (a rank or extent; queries that are not evenly spaced, stride 0 = next_n * stride 1;
/// next_n).
Result<Problem> decode_problem(const DecodeStep& step);

}  // namespace dosa
