// What the inequality becomes where tensor cores evaluate it: bf16 weights, an FP8 pair of auxiliary rows, tau divided
// by the scale. Formulas that the host and the device kernels share; certificate.md, sections 7 and 9, derives them.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "base/numeric.hpp"

namespace dosa {

inline constexpr int kWgmmaStep = 32;                // components of one FP8 tensor-core step
inline constexpr double kWgmmaRounding = 0x1p-13;    // addends and sums keep 13 bits below the leading one
inline constexpr double kSmallestExponent = 0x1p-6;  // that E4M3 subnormals share

// --------------------------------------------------------------------------------------------------- roundings, as
// constexpr

/// The smallest f32 that is not below x >= 0; +inf beyond the largest.
constexpr float up_to_float(double x) noexcept {
  if (x > static_cast<double>(std::numeric_limits<float>::max())) return std::numeric_limits<float>::infinity();
  const auto nearest = static_cast<float>(x);
  return static_cast<double>(nearest) < x ? std::bit_cast<float>(std::bit_cast<std::uint32_t>(nearest) + 1) : nearest;
}

/// The largest f32 that is not above x >= 0.
constexpr float down_to_float(double x) noexcept {
  if (x >= static_cast<double>(std::numeric_limits<float>::max())) return std::numeric_limits<float>::max();
  const auto nearest = static_cast<float>(x);
  return static_cast<double>(nearest) > x ? std::bit_cast<float>(std::bit_cast<std::uint32_t>(nearest) - 1) : nearest;
}

// ------------------------------------------------------------------------------------------------------- tensor-core
// dots

/// sum_i |multiplier_i| |error of row_i . k| <= per_exponent * 2^Emax(k) + per_norm * max(||k||, 2^-6), with Emax the
/// largest exponent of a component (-6 for subnormals), so that 2^Emax(k) <= max(||k||, 2^-6).
struct WgmmaAllowance {
  double per_exponent = 0;
  double per_norm = 0;

  /// Per unit of max(||k||, 2^-6).
  [[nodiscard]] constexpr double total() const noexcept { return per_exponent + per_norm; }
};

/// Error of one dot over `steps` steps per unit of max(||q||, 2^-6) max(||k||, 2^-6): 32 truncated addends in the first
/// step, 33 later, one truncated sum each.
constexpr double wgmma_steps_error(int steps) noexcept { return (34.0 * steps - 1) * kWgmmaRounding; }

/// The joint allowance from sums over the rows: of multiplier 2^Emax, of multiplier max(||row||, 2^-6), and the prefix
/// norms G_t, t = 1..steps.
constexpr WgmmaAllowance wgmma_allowance(double exponents, double norms, const double* prefix_norm,
                                         int steps) noexcept {
  double weighted = 0;         // 33 (G_1 + ... ) + G_last
  double error_of_errors = 0;  // the same sum over the steps' own error constants
  for (int t = 0; t < steps; ++t) {
    const double count = t + 1 < steps ? 33 : 1;
    weighted += count * prefix_norm[t];
    error_of_errors += count * wgmma_steps_error(t + 1);
  }
  constexpr double widen = 1 + 0x1p-40;  // f64 rounding of the sums
  return {(33.0 * steps - 1) * kWgmmaRounding * exponents * widen,
          kWgmmaRounding * (weighted + error_of_errors * norms) * widen};
}

// -------------------------------------------------------------------------------------------------------- the screen's
// body

/// g of certificate.md 4.1 for the sm90 reference: chains of heads / 8 roundings, the sum of two of them, the scale,
/// two sums.
constexpr double hopper_head_sum(int heads) noexcept { return gamma_n((heads + 7) / 8 + 4); }

/// bf16 weight of a retained head whose coefficient is v, such that it covers what bf16 does to the head's dot, and
/// leaves at least 2^-11.02 of |v| [x]+ to the tensor cores that sum: up for v > 0, toward zero for v < 0.
constexpr std::uint16_t hopper_weight(double v) noexcept {
  constexpr double widen = 0x1p-8 + 0x1p-11;
  constexpr std::uint32_t least = 0x0080;  // 2^-126: smaller ones might be flushed
  if (v > 0) {
    const std::uint32_t bits = (std::bit_cast<std::uint32_t>(up_to_float(v * (1 + widen))) + 0xFFFFU) >> 16;
    return static_cast<std::uint16_t>(bits < least ? least : bits);
  }
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(down_to_float(-v * (1 - widen))) >> 16;
  return static_cast<std::uint16_t>(bits < least ? 0 : bits | 0x8000U);
}

/// What multiplies ||k|| in the screen's body.
struct HopperTerms {
  double residual = 0;   // E of the base form, half of E' of the extended one
  double lost = 0;       // length of what the FP8 pair leaves of the auxiliary vector, its rounding included
  double wgmma = 0;      // allowance of omitted heads, anchors' folded weight and auxiliary rows
  double pair = 0;       // |sigma_high| ||high|| + |sigma_low| ||low||
  double magnitude = 0;  // sum |w_h| ||q_h|| over all heads and of all folded weights, for the rounding of sums
};

/// c, before it is rounded up to f32: C sqrt(dim), enlarged for the roundings of the decision; > 0. `scale` is 1; tests
/// that must fail without the allowances set it to 0.
constexpr double hopper_constant(const HopperTerms& t, double sqrt_dim, double scale) noexcept {
  constexpr double decision = 0x1p-21;  // five f32 operations
  const double c = t.residual + t.lost + scale * (t.wgmma + decision * t.pair + 0x1p-30 * t.magnitude);
  return c * sqrt_dim * (1 + scale * decision) + 0x1p-100;
}

/// The tau that is multiplied by 1 / alpha: lowered for the roundings of both, and for scores that underflow. Not
/// finite where nothing can be screened.
constexpr float hopper_tau(float tau, double scale) noexcept {
  constexpr double most = std::numeric_limits<float>::max();
  if (!(tau >= -std::numeric_limits<float>::max())) return -std::numeric_limits<float>::infinity();
  const double clamped = static_cast<double>(tau) > most ? most : static_cast<double>(tau);
  const double size = clamped < 0 ? -clamped : clamped;
  const double lowered = clamped - scale * (0x1p-18 * size + 0x1p-90);
  if (lowered < -most) return -std::numeric_limits<float>::infinity();
  return lowered < 0 ? -up_to_float(-lowered) : down_to_float(lowered);
}

}  // namespace dosa
