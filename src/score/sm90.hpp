// One FP8 tensor-core step of Hopper (wgmma, k = 32, E4M3 x E4M3 -> f32), bit for bit.
#pragma once

#include <cstdint>
#include <span>

namespace dosa {

/// An E4M3 value as the tensor core sees it. The exponent is that of the format, not renormalised: subnormals share the
/// one of the smallest normals. Zero and NaN carry exponents that dominate in no sum, or in every sum.
struct Sm90Operand {
  float value;
  std::int32_t exponent;  // -6..8
};

inline constexpr int kSm90Step = 32;

Sm90Operand sm90_operand(std::uint8_t e4m3) noexcept;

/// c + sum a_i b_i as the tensor core rounds it. `c` is 0 or the result of an earlier step.
float sm90_step(std::span<const Sm90Operand, kSm90Step> a, std::span<const Sm90Operand, kSm90Step> b, float c) noexcept;

/// The dot of two rows: steps in order, from 0. Of the same length, a multiple of kSm90Step.
float sm90_dot(std::span<const Sm90Operand> a, std::span<const Sm90Operand> b) noexcept;

/// The same of E4M3 rows of `dim` components, at most 128.
float sm90_dot(const std::uint8_t* a, const std::uint8_t* b, int dim) noexcept;

}  // namespace dosa
