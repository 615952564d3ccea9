// Quantisation of f32 or bf16 rows to FP8 E4M3, as indexer caches hold them.
#pragma once

#include <cstdint>
#include <span>

#include "dosa/pages.hpp"

namespace dosa {

/// Rounds row / scale to nearest even E4M3, saturating at +-448, and returns the scale. NaN gives the NaN byte;
/// infinities saturate and, like NaN, take no part in amax, so that one bad component does not erase the others.
/// `floor` keeps all-zero rows from a zero scale (DeepGEMM and vLLM use 1e-4 and 1e-10); where the scale is zero all
/// the same, so are the bytes.
float quantize_row(std::span<const float> row, std::span<std::uint8_t> out, ScaleRule rule, float floor = 1e-4F);
float quantize_row_bf16(std::span<const std::uint16_t> row, std::span<std::uint8_t> out, ScaleRule rule,
                        float floor = 1e-4F);

/// Round to nearest even, saturating; NaN gives 0x7F.
std::uint8_t encode_e4m3(float value) noexcept;

}  // namespace dosa
