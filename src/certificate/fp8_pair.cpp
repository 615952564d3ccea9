#include "certificate/fp8_pair.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/dtype.hpp"
#include "base/numeric.hpp"
#include "score/quantize.hpp"

namespace dosa {
namespace {

constexpr std::size_t kMaxLength = 128;
using Rest = std::array<double, kMaxLength>;

// Takes sigma * row out of y and returns sigma. A product of sigma (24 bits) and an E4M3 value (4 bits) is exact in
// f64, and so is what it leaves of an f32: the rest is measured, not estimated.
float take_row(Rest& y, std::span<std::uint8_t> row) {
  double largest = 0;
  for (std::size_t d = 0; d < row.size(); ++d) largest = std::max(largest, std::abs(y[d]));
  auto sigma = static_cast<float>(largest / static_cast<double>(kE4m3Max));
  bool zero = true;
  for (std::size_t d = 0; d < row.size(); ++d) {
    row[d] = sigma > 0.0F ? encode_e4m3(static_cast<float>(y[d] / static_cast<double>(sigma))) : 0;
    y[d] -= static_cast<double>(sigma) * static_cast<double>(kE4m3Table[row[d]]);
    zero = zero && kE4m3Table[row[d]] == 0.0F;
  }
  return zero ? 0.0F : sigma;
}

}  // namespace

Fp8Pair split_fp8(std::span<const float> y, std::span<std::uint8_t> high, std::span<std::uint8_t> low) {
  Rest rest{};
  std::copy(y.begin(), y.end(), rest.begin());
  Fp8Pair out;
  out.sigma_high = take_row(rest, high.first(y.size()));
  out.sigma_low = take_row(rest, low.first(y.size()));
  double square = 0;
  for (const double r : rest) square += r * r;
  out.rest = round_up(std::sqrt(square) * (1 + 0x1p-40));  // the subtractions above round, if at all, by far less
  return out;
}

}  // namespace dosa
