// FP8 E4M3 and the exact values it stands for.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>

namespace dosa {

inline constexpr std::uint8_t kE4m3NaN = 0x7F;  // and 0xFF
inline constexpr float kE4m3Max = 448.0F;

constexpr bool is_nan_e4m3(std::uint8_t byte) noexcept { return (byte & 0x7F) == kE4m3NaN; }

/// OCP E4M3 "fn": sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinities. Every value is a multiple of 2^-9.
constexpr float decode_e4m3(std::uint8_t byte) noexcept {
  if (is_nan_e4m3(byte)) return std::numeric_limits<float>::quiet_NaN();
  const std::uint32_t sign = (byte & 0x80U) << 24;
  const std::uint32_t magnitude = byte & 0x7FU;
  // Exponent field 0 is subnormal: m * 2^-9. Otherwise rebias from 7 to 127.
  const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9F
                                    : std::bit_cast<float>((magnitude << 20) + (120U << 23));
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

inline constexpr std::array<float, 256> kE4m3Table = [] {
  std::array<float, 256> table{};
  for (unsigned byte = 0; byte < 256; ++byte) table[byte] = decode_e4m3(static_cast<std::uint8_t>(byte));
  return table;
}();

}  // namespace dosa
