// Made-up problems: random families, explicit scores, and more keys for a real trace.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dosa/problem.hpp"

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

}  // namespace dosa
