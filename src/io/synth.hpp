// Made-up problems: random families, explicit scores, and more keys for a real trace.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dosa/problem.hpp"
#include "io/trace.hpp"

namespace dosa {

/// A problem that owns dense arrays.
struct Activations {
  std::int64_t nq = 0;
  std::int64_t nk = 0;
  std::int32_t heads = 0;
  std::int32_t dim = 0;
  std::vector<std::uint8_t> q;       // [nq, heads, dim]
  std::vector<std::uint8_t> k;       // [nk, dim]
  std::vector<float> k_scale;        // [nk]
  std::vector<float> w;              // [nq, heads]
  std::vector<std::int32_t> ks, ke;  // [nq]

  /// Zero bytes, scales and weights; every query sees every key.
  static Activations zeros(std::int64_t nq, std::int64_t nk, std::int32_t heads, std::int32_t dim);

  /// Views this value, which must stay where it is.
  [[nodiscard]] Problem problem() const;
};

/// Key i scores exactly scores[i], any f32 but a NaN's payload, in every row. Nothing rounds: head 0 is e0 with weight
/// +1, head 1 is e1 with weight -1, all other heads are zero; a key holds 1.0 in dimension 0 (score of positive sign)
/// or 1, and its scale is |score|.
Activations with_scores(std::span<const float> scores, std::int64_t nq, std::int32_t heads, std::int32_t dim);

struct RandomFamily {
  double positive = 0.3;     ///< share of heads with a positive weight
  double correlation = 0.5;  ///< of query heads, and of keys, with one direction that all share
};

/// Gaussian activations in the shape of real ones, quantised like them; query j sees keys 0..nk-nq+j.
Activations random_activations(std::int64_t nq, std::int64_t nk, std::int32_t heads, std::int32_t dim,
                               const RandomFamily& family, std::uint64_t seed);

/// `problem` (dense) with nk keys: copies of its keys with Gaussian noise of `jitter` times a key's root mean square
/// come before them, so that every query sees them and keeps its own neighbourhood. nk must not be below the problem's.
Activations extended(const Problem& problem, std::int64_t nk, double jitter, std::uint64_t seed);

/// A decode stream that owns dense arrays.
struct DecodeStream {
  std::int64_t steps = 0, requests = 0, next_n = 0, page_size = 0;
  std::int32_t heads = 0, dim = 0;
  std::vector<std::uint8_t> q;                           // [steps, requests, next_n, heads, dim]
  std::vector<float> w;                                  // [steps, requests, next_n, heads]
  std::vector<std::uint8_t> kv_cache;                    // [pages, page_size, 1, dim + 4]
  std::vector<std::int32_t> block_table, context_lens;  // [requests, max_blocks], [steps, requests, next_n]

  /// Views this value, which must stay where it is.
  [[nodiscard]] DecodeTensors tensors() const;
};

struct StreamShape {
  std::int64_t requests = 1, next_n = 1, page_size = 64;
};

/// The queries of `problem` (dense, every one sees its keys from 0 on) as draft tokens: request r decodes the r-th stretch
/// of them, next_n a step; queries that do not fill a step are left out. Requests share the pages of one pool, which are in
/// random order. Errors: invalid_argument (fewer queries than one step has, a first visible key that is not 0).
Result<DecodeStream> as_decode_stream(const Problem& problem, const StreamShape& shape, std::uint64_t seed);

}  // namespace dosa
