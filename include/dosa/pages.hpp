// Keys in pages: writing, reading and moving them in host memory. Problem (problem.hpp) says how a page is laid out.
//
// A slot is a key's place in a pool: page * page_size + offset. Pools are f8_e4m3 (uint8) [pages, page_size, 1, dim +
// 4]; the page stride is free, so that one pool may hold the pages of several layers side by side.
#pragma once

#include <cstdint>

#include "dosa/result.hpp"
#include "dosa/tensor.hpp"

namespace dosa {

/// How the scale of a quantised row is chosen.
enum class ScaleRule : std::uint8_t {
  amax,          ///< scale = max(amax, floor) / 448
  power_of_two,  ///< that, rounded up to a power of two (UE8M0), at least 2^-126
};

struct QuantizeRule {
  ScaleRule scale = ScaleRule::amax;
  float floor = 1e-4F;  ///< keeps all-zero rows from a zero scale; DeepGEMM uses 1e-4, vLLM 1e-10
};

/// Quantises keys and writes each to its slot, values and scale.
/// kv_cache [pages, page_size, 1, dim + 4]; keys f32 or bf16 [n, dim]; slots i32 [n], a negative one skips its key.
/// Ownership: nothing is kept. Thread rule: calls may run at once on different slots.
/// Errors, before anything is written: invalid_argument (a tensor, a slot outside the pool), unsupported_shape
/// (page_size). Cost: one pass over the keys. Source: `indexer_k_quant_and_cache` of vLLM.
Result<void> insert_keys(const MutableTensorView& kv_cache, const TensorView& keys, const TensorView& slots,
                         const QuantizeRule& rule = {});

/// Copies the keys at positions [first, first + n) of one request to contiguous arrays, bit for bit.
/// kv_cache [pages, page_size, 1, dim + 4]; blocks i32 [max_blocks], the request's row of the block table; k f8_e4m3
/// [n, dim] and k_scale f32 [n], both written.
/// Ownership, thread rule: as insert_keys.
/// Errors, before anything is written: invalid_argument (a tensor, positions or page ids out of range),
/// unsupported_shape. Cost: one pass over the keys. Source: `cp_gather_indexer_k_quant_cache` of vLLM.
Result<void> gather_keys(const TensorView& kv_cache, const TensorView& blocks, std::int64_t first,
                         const MutableTensorView& k, const MutableTensorView& k_scale);

/// Copies keys from slots of one pool to slots of the same or another, bit for bit, one after the other in their order.
/// from, to [pages, page_size, 1, dim + 4], page sizes may differ; from_slots, to_slots i32 [n], a negative one skips
/// its pair. Ownership, thread rule: as insert_keys. Errors, before anything is written: invalid_argument (a tensor, a
/// slot outside its pool), unsupported_shape. Cost: one pass over the keys.
Result<void> move_keys(const TensorView& from, const TensorView& from_slots, const MutableTensorView& to,
                       const TensorView& to_slots);

}  // namespace dosa
