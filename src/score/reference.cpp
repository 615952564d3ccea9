#include "score/reference.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/numeric.hpp"

namespace dosa {
namespace {

constexpr std::size_t kBlock = 8;  // heads of independent chains; also the period of DeepGEMM's epilogue
constexpr std::size_t kMaxScoredHeads = 128;
constexpr std::size_t kMaxScoredDim = 128;

constexpr std::size_t round_up_to_block(std::size_t heads) { return (heads + kBlock - 1) / kBlock * kBlock; }

}  // namespace

QueryScorer::QueryScorer(ReferenceScorer scorer, std::span<const std::uint8_t> q, std::span<const float> w)
    : scorer_(scorer), dim_(q.size() / w.size()), w_(w.begin(), w.end()) {
  const std::size_t heads = w.size();
  DOSA_INVARIANT(heads <= kMaxScoredHeads && dim_ <= kMaxScoredDim && dim_ % kSm90Step == 0);
  if (scorer == ReferenceScorer::sm90) {
    operands_.resize(q.size());
    std::transform(q.begin(), q.end(), operands_.begin(), sm90_operand);
    return;
  }
  q_.assign(round_up_to_block(heads) * dim_, 0.0F);
  for (std::size_t h = 0; h < heads; ++h) {
    for (std::size_t d = 0; d < dim_; ++d) {
      q_[(h / kBlock * dim_ + d) * kBlock + h % kBlock] = kE4m3Table[q[h * dim_ + d]];
    }
  }
}

float QueryScorer::operator()(std::span<const std::uint8_t> k, float k_scale) const {
  return scorer_ == ReferenceScorer::cpu ? score_cpu(k, k_scale) : score_sm90(k, k_scale);
}

float QueryScorer::score_cpu(std::span<const std::uint8_t> k, float k_scale) const {
  float sum = 0.0F;
  const float* q = q_.data();
  for (std::size_t first = 0; first < w_.size(); first += kBlock) {
    // Eight heads side by side; each dot is one chain over d. Products of two E4M3 values are exact in f32, so that a
    // multiplication and an addition round as the FMA of the contract does.
    std::array<float, kBlock> x{};
    for (std::size_t d = 0; d < dim_; ++d, q += kBlock) {
      const float component = kE4m3Table[k[d]];
      for (std::size_t h = 0; h < kBlock; ++h) x[h] += q[h] * component;
    }
    const std::size_t heads = std::min(kBlock, w_.size() - first);
    for (std::size_t h = 0; h < heads; ++h) sum = std::fma(w_[first + h], relu(x[h]), sum);
  }
  return k_scale * sum;
}

float QueryScorer::score_sm90(std::span<const std::uint8_t> k, float k_scale) const {
  std::array<Sm90Operand, kMaxScoredDim> key;
  std::transform(k.begin(), k.end(), key.begin(), sm90_operand);

  // Eight chains over heads t * 8 + chain. Missing heads of the last round have weight +0 and dot +0.
  std::array<float, kBlock> chain;
  for (std::size_t h = 0; h < round_up_to_block(w_.size()); ++h) {
    float w = 0.0F;
    float x = 0.0F;
    if (h < w_.size()) {
      w = w_[h];
      x = sm90_dot(std::span(operands_).subspan(h * dim_, dim_), std::span(key).first(dim_));
    }
    float& sum = chain[h % kBlock];
    sum = h < kBlock ? w * relu(x) : std::fma(w, relu(x), sum);
  }

  // A quad of lanes, each with an even and an odd chain; then the sums across the quad.
  std::array<float, 4> lane;
  for (std::size_t c = 0; c < 4; ++c) lane[c] = (chain[2 * c] + chain[2 * c + 1]) * k_scale;
  return (lane[0] + lane[1]) + (lane[2] + lane[3]);
}

float reference_score(ReferenceScorer scorer, std::span<const std::uint8_t> q, std::span<const float> w,
                      std::span<const std::uint8_t> k, float k_scale) {
  return QueryScorer(scorer, q, w)(k, k_scale);
}

}  // namespace dosa
