// What is asked: indexer activations, visible ranges, and how many keys each query may keep.
#pragma once

#include <cstdint>

#include "dosa/tensor.hpp"

namespace dosa {

/// One selection problem, as DeepGEMM's `fp8_mqa_logits` takes it.
///
///   x_h(i) = q_h . k_i                                 raw FP8 components, no scale
///   score(i) = k_scale_i * sum_h w_h * max(x_h(i), 0)
///
/// Query j may select the keys i with max(ks_j, 0) <= i < min(ke_j, nk). Non-finite data is legal: a NaN dot counts as 0,
/// anything else reaches the score; a NaN score ranks below -inf. The arrays are only read, and only during a call.
struct Problem {
  TensorView q;        ///< f8_e4m3 [nq, heads, dim]
  TensorView k;        ///< f8_e4m3 [nk, dim]
  TensorView k_scale;  ///< f32 [nk]
  TensorView w;        ///< f32 [nq, heads], signed; query scale, softmax scale and heads^-1/2 folded in by the caller
  TensorView ks;       ///< i32 [nq], first visible key; absent: 0
  TensorView ke;       ///< i32 [nq], one past the last visible key; absent: nk
  TensorView hints;    ///< i32 [nq, m] or [1, m], likely winners (absolute ids); may repeat or be out of range; absent: none
  std::int32_t topk = 2048;  ///< keys to keep per query, 1..4096
};

/// The part of a Problem that fixes a plan.
struct ProblemShape {
  std::int64_t nq = 0;
  std::int64_t nk = 0;
  std::int32_t heads = 0;  ///< 1..128
  std::int32_t dim = 128;  ///< 32, 64 or 128
  std::int32_t topk = 2048;

  friend bool operator==(const ProblemShape&, const ProblemShape&) = default;
};

}  // namespace dosa
