// An f32 vector as two FP8 rows, for screens whose bound rows are FP8 like the heads.
#pragma once

#include <cstdint>
#include <span>

namespace dosa {

/// || y - sigma_high high - sigma_low low || <= rest. A row that is zero has sigma 0.
struct Fp8Pair {
  float sigma_high = 0;
  float sigma_low = 0;
  float rest = 0;  // eta: enters the bound as rest * ||k||
};

/// Splits y, finite and at most 128 long. high = E4M3 of y / sigma_high with sigma_high = amax / 448, low the same of
/// what is left: about ||y|| / 400 remains.
Fp8Pair split_fp8(std::span<const float> y, std::span<std::uint8_t> high, std::span<std::uint8_t> low);

}  // namespace dosa
