// Reference scores: the values every method of a backend must reproduce bit for bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "score/sm90.hpp"

namespace dosa {

/// Which arithmetic defines the score.
enum class ReferenceScorer : std::uint8_t {
  cpu,   ///< f32 FMA chains over components and heads, then one multiplication by the key scale
  sm90,  ///< DeepGEMM's SM90 kernels: four FP8 wgmma steps, eight epilogue chains per key, quad sums
};

/// One query, decoded once, to be scored against many keys. Any finite or non-finite data.
/// q e4m3 [heads, dim] row-major, w f32 [heads], dim a multiple of 32 (sm90 takes one step per 32 components).
class QueryScorer {
 public:
  QueryScorer(ReferenceScorer scorer, std::span<const std::uint8_t> q, std::span<const float> w);

  /// k e4m3 [dim].
  [[nodiscard]] float operator()(std::span<const std::uint8_t> k, float k_scale) const;

 private:
  [[nodiscard]] float score_cpu(std::span<const std::uint8_t> k, float k_scale) const;
  [[nodiscard]] float score_sm90(std::span<const std::uint8_t> k, float k_scale) const;

  ReferenceScorer scorer_;
  std::size_t dim_;
  std::vector<float> w_;
  std::vector<float> q_;               // cpu: [ceil(heads / 8), dim, 8], absent heads are 0
  std::vector<Sm90Operand> operands_;  // sm90: [heads, dim]
};

/// Score of one query and key.
float reference_score(ReferenceScorer scorer, std::span<const std::uint8_t> q, std::span<const float> w,
                      std::span<const std::uint8_t> k, float k_scale);

}  // namespace dosa
