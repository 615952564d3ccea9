#include "score/quantize.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/dtype.hpp"

namespace dosa {
namespace {

template <typename T, typename ToFloat>
float quantize(std::span<const T> row, std::span<std::uint8_t> out, ScaleRule rule, float floor, ToFloat to_float) {
  float amax = floor;
  for (const T element : row) {
    const float magnitude = std::fabs(to_float(element));
    if (std::isfinite(magnitude)) amax = std::max(amax, magnitude);
  }
  float scale = amax / kE4m3Max;
  if (rule == ScaleRule::power_of_two && scale > 0) {
    // Carries into the exponent unless all fraction bits are zero.
    scale = std::bit_cast<float>((std::bit_cast<std::uint32_t>(scale) + 0x7FFFFFU) & 0xFF800000U);
  }
  std::transform(row.begin(), row.end(), out.begin(), [&](T element) {
    const float value = to_float(element);
    return encode_e4m3(scale > 0 || std::isnan(value) ? value / scale : 0.0F);
  });
  return scale;
}

}  // namespace

float quantize_row(std::span<const float> row, std::span<std::uint8_t> out, ScaleRule rule, float floor) {
  return quantize(row, out, rule, floor, [](float x) { return x; });
}

float quantize_row_bf16(std::span<const std::uint16_t> row, std::span<std::uint8_t> out, ScaleRule rule, float floor) {
  return quantize(row, out, rule, floor,
                  [](std::uint16_t x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); });
}

std::uint8_t encode_e4m3(float value) noexcept {
  if (std::isnan(value)) return kE4m3NaN;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const int exponent = static_cast<int>(bits >> 23 & 0xFF);
  // The f32 significand keeps 4 of its 24 bits, fewer below 2^-6 (f32 exponent field 121), where E4M3 is subnormal. An
  // f32 subnormal gets a wrong significand here, but is shifted out like everything below half of 2^-9.
  const std::uint32_t significand = (bits & 0x7FFFFFU) | 0x800000U;
  const int drop = std::min(20 + std::max(121 - exponent, 0), 25);
  const std::uint32_t half_and_even = (1U << (drop - 1)) - 1 + (significand >> drop & 1U);
  const std::uint32_t rounded = (significand + half_and_even) >> drop;
  // The implicit bit adds 8, and a carry out of the significand steps the exponent.
  const std::uint32_t code = rounded + (static_cast<std::uint32_t>(std::max(exponent - 121, 0)) << 3);
  return static_cast<std::uint8_t>(std::min(code, 0x7EU) | (bits >> 24 & 0x80U));
}

}  // namespace dosa
