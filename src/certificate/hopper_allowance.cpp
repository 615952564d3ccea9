#include "certificate/hopper_allowance.hpp"

#include <algorithm>
#include <cmath>

#include "certificate/heads.hpp"

namespace dosa {
namespace {

constexpr int kStep = 32;                // components of one tensor-core step
constexpr double kTruncation = 0x1p-13;  // addends and sums keep 13 bits below the leading one
constexpr double kSmallest = 0x1p-6;     // exponent that E4M3 subnormals share

// 2^Emax of a row of E4M3 values.
double power_of_largest(std::span<const float> row) {
  float largest = 0;
  for (const float v : row) largest = std::max(largest, std::abs(v));
  if (static_cast<double>(largest) < kSmallest) return kSmallest;
  int exponent = 0;
  std::frexp(largest, &exponent);
  return std::ldexp(1.0, exponent - 1);
}

}  // namespace

double wgmma_dot_error(int dim) noexcept {
  // 32 truncated addends in the first step, 33 later, one truncated sum each.
  const int steps = dim / kStep;
  return (34.0 * steps - 1) * kTruncation;
}

WgmmaAllowance wgmma_joint_error(std::span<const float> rows, std::span<const double> multiplier, int dim) {
  const std::size_t n = multiplier.size();
  const auto width = static_cast<std::size_t>(dim);
  const int steps = dim / kStep;
  WgmmaAllowance out;
  double prefix_norms[kMaxDim / kStep] = {};  // G_t^2
  double second_order = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto row = rows.subspan(i * width, width);
    const double m = std::abs(multiplier[i]);
    out.per_exponent += m * power_of_largest(row);
    double square = 0;
    for (std::size_t l = 0; l <= i; ++l) {
      const auto other = rows.subspan(l * width, width);
      const double pair = m * std::abs(multiplier[l]) * (l == i ? 1 : 2);
      double dot = 0;
      for (int t = 0; t < steps; ++t) {
        for (int d = t * kStep; d < (t + 1) * kStep; ++d) dot += static_cast<double>(row[d]) * other[d];
        prefix_norms[t] += pair * std::abs(dot);
      }
      square = dot;
    }
    second_order += m * std::max(std::sqrt(square), kSmallest);
  }
  double weighted = 0;         // 33 (G_1 + ... ) + G_last
  double error_of_errors = 0;  // the same sum over the steps' own error constants
  for (int t = 0; t < steps; ++t) {
    const double count = t + 1 < steps ? 33 : 1;
    weighted += count * std::sqrt(prefix_norms[t]);
    error_of_errors += count * wgmma_dot_error((t + 1) * kStep);
  }
  constexpr double widen = 1 + 0x1p-40;  // f64 rounding of the sums; the dots of E4M3 values are exact
  out.per_exponent *= (33.0 * steps - 1) * kTruncation * widen;
  out.per_norm = kTruncation * (weighted + error_of_errors * second_order) * widen;
  return out;
}

}  // namespace dosa
