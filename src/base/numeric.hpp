// Directed rounding, error constants, ReLU, and the total order of scores.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace dosa {

inline constexpr double kUnitRoundoff = 0x1p-24;  // f32, round to nearest

/// Standard bound of n accumulated relative roundings: (1 + d1)...(1 + dn) = 1 + t with |t| <= gamma(n).
constexpr double gamma_n(int n) noexcept {
  const double nu = static_cast<double>(n) * kUnitRoundoff;
  return nu / (1.0 - nu);
}

/// The smallest f32 that is not below x.
inline float round_up(double x) noexcept {
  const float nearest = static_cast<float>(x);
  return static_cast<double>(nearest) < x ? std::nextafterf(nearest, std::numeric_limits<float>::infinity()) : nearest;
}

/// The largest f32 that is not above x.
inline float round_down(double x) noexcept { return -round_up(-x); }

/// x > 0 ? x : +0. A NaN gives +0 (std::max would keep it).
constexpr float relu(float x) noexcept { return x > 0.0F ? x : 0.0F; }

/// Maps scores to unsigned integers so that a better score has the smaller code: +inf first, then numbers, -inf, NaN.
/// -0.0 and +0.0 share a code, all NaN share the last one.
inline std::uint32_t order_code(float score) noexcept {
  if (std::isnan(score)) return 0xFFFFFFFFU;
  const auto bits = std::bit_cast<std::uint32_t>(score + 0.0F);
  return (bits & 0x80000000U) != 0 ? bits : 0x7FFFFFFFU - bits;
}

/// Inverse of order_code; NaN comes back as 0x7FC00000, zeros as +0.0.
inline float score_of_code(std::uint32_t code) noexcept {
  if (code == 0xFFFFFFFFU) return std::bit_cast<float>(0x7FC00000U);
  return std::bit_cast<float>((code & 0x80000000U) != 0 ? code : 0x7FFFFFFFU - code);
}

}  // namespace dosa
