#include "score/sm90.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "base/dtype.hpp"

namespace dosa {
namespace {

constexpr int kZeroExponent = -1000;  // below every other sum of two exponents
constexpr int kNaNExponent = 4000;    // above every other sum, even with a zero
constexpr int kFractionBits = 13;     // kept when aligning addends, and in the result

int exponent_of(float c) noexcept {
  const int field = static_cast<int>(std::bit_cast<std::uint32_t>(c) >> 23 & 0xFF);
  return c == 0.0F ? 2 * kZeroExponent : std::max(field, 1) - 127;
}

// 2^n for exponents of f32's normal range, which sums of E4M3 products are far inside of.
float power_of_two(int n) noexcept { return std::bit_cast<float>(static_cast<std::uint32_t>(n + 127) << 23); }

}  // namespace

Sm90Operand sm90_operand(std::uint8_t e4m3) noexcept {
  if (is_nan_e4m3(e4m3)) return {0.0F, kNaNExponent};
  if ((e4m3 & 0x7F) == 0) return {0.0F, kZeroExponent};
  return {kE4m3Table[e4m3], std::max(e4m3 >> 3 & 0xF, 1) - 7};
}

float sm90_step(std::span<const Sm90Operand, kSm90Step> a, std::span<const Sm90Operand, kSm90Step> b,
                float c) noexcept {
  // The largest exponent aligns all addends. Products are not renormalised first.
  int e = exponent_of(c);
  for (std::size_t i = 0; i < kSm90Step; ++i) e = std::max(e, a[i].exponent + b[i].exponent);
  if (e >= kNaNExponent + kZeroExponent) return std::numeric_limits<float>::quiet_NaN();
  if (!std::isfinite(c)) return c;
  if (e <= kZeroExponent / 2) return 0.0F;

  // Every addend is truncated toward zero to a multiple of the unit 2^(e - 13); the sum of those is exact. Products are
  // exact in f32, in units as well, and below 2^15 units.
  const float units = power_of_two(kFractionBits - e);
  auto sum = static_cast<std::int32_t>(c * units);
  for (std::size_t i = 0; i < kSm90Step; ++i) sum += static_cast<std::int32_t>(a[i].value * b[i].value * units);

  // The result keeps 13 fraction bits, truncated toward zero.
  const auto magnitude = static_cast<std::uint32_t>(std::abs(sum));
  const int drop = std::max(static_cast<int>(std::bit_width(magnitude)) - (kFractionBits + 1), 0);
  const auto kept = static_cast<float>(magnitude >> drop << drop);
  return (sum < 0 ? -kept : kept) * power_of_two(e - kFractionBits);
}

float sm90_dot(std::span<const Sm90Operand> a, std::span<const Sm90Operand> b) noexcept {
  float sum = 0;
  for (std::size_t d = 0; d < a.size(); d += kSm90Step) {
    sum = sm90_step(a.subspan(d).first<kSm90Step>(), b.subspan(d).first<kSm90Step>(), sum);
  }
  return sum;
}

float sm90_dot(const std::uint8_t* a, const std::uint8_t* b, int dim) noexcept {
  const auto size = static_cast<std::size_t>(dim);
  std::array<Sm90Operand, 128> x, y;
  std::transform(a, a + size, x.begin(), sm90_operand);
  std::transform(b, b + size, y.begin(), sm90_operand);
  return sm90_dot(std::span(x).first(size), std::span(y).first(size));
}

}  // namespace dosa
