#include "score/sm90.hpp"

#include <algorithm>
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

}  // namespace

Sm90Operand sm90_operand(std::uint8_t e4m3) noexcept {
  if (is_nan_e4m3(e4m3)) return {0, kNaNExponent};
  const int field = e4m3 >> 3 & 0xF;
  const int significand = (e4m3 & 7) + (field > 0 ? 8 : 0);
  if (significand == 0) return {0, kZeroExponent};
  return {static_cast<std::int16_t>((e4m3 & 0x80) != 0 ? -significand : significand),
          static_cast<std::int16_t>(std::max(field, 1) - 7)};
}

float sm90_step(std::span<const Sm90Operand, kSm90Step> a, std::span<const Sm90Operand, kSm90Step> b,
                float c) noexcept {
  // The largest exponent aligns all addends. Products are not renormalised first.
  int e = exponent_of(c);
  for (std::size_t i = 0; i < kSm90Step; ++i) e = std::max(e, a[i].exponent + b[i].exponent);
  if (e >= kNaNExponent + kZeroExponent) return std::numeric_limits<float>::quiet_NaN();
  if (!std::isfinite(c)) return c;
  if (e <= kZeroExponent / 2) return 0.0F;

  // Every addend is truncated toward zero to a multiple of the unit 2^(e - 13); the sum of those is exact. A product is
  // sa sb 2^(e_i - 6) = sa sb 2^7 2^(e_i - e) units.
  auto sum = static_cast<std::int64_t>(std::ldexp(c, kFractionBits - e));
  for (std::size_t i = 0; i < kSm90Step; ++i) {
    const int product = a[i].significand * b[i].significand;
    const int below = std::min(e - a[i].exponent - b[i].exponent, 31);
    const int units = static_cast<int>(static_cast<std::uint32_t>(std::abs(product)) << 7 >> below);
    sum += product < 0 ? -units : units;
  }

  // The result keeps 13 fraction bits, truncated toward zero.
  auto magnitude = static_cast<std::uint64_t>(std::abs(sum));
  const int drop = std::max(static_cast<int>(std::bit_width(magnitude)) - (kFractionBits + 1), 0);
  magnitude = magnitude >> drop << drop;
  const auto value =
      static_cast<float>(sum < 0 ? -static_cast<std::int64_t>(magnitude) : static_cast<std::int64_t>(magnitude));
  return std::ldexp(value, e - kFractionBits);
}

}  // namespace dosa
