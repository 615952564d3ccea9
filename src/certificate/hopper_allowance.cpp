#include "certificate/hopper_allowance.hpp"

#include <algorithm>
#include <cmath>

#include "certificate/heads.hpp"

namespace dosa {
namespace {

// 2^Emax of a row of E4M3 values.
double power_of_largest(std::span<const float> row) {
  float largest = 0;
  for (const float v : row) largest = std::max(largest, std::abs(v));
  if (static_cast<double>(largest) < kSmallestExponent) return kSmallestExponent;
  int exponent = 0;
  std::frexp(largest, &exponent);
  return std::ldexp(1.0, exponent - 1);
}

}  // namespace

double wgmma_dot_error(int dim) noexcept { return wgmma_steps_error(dim / kWgmmaStep); }

WgmmaAllowance wgmma_joint_error(std::span<const float> rows, std::span<const double> multiplier, int dim) {
  const std::size_t n = multiplier.size();
  const auto width = static_cast<std::size_t>(dim);
  const int steps = dim / kWgmmaStep;
  double prefix_norm[kMaxDim / kWgmmaStep] = {};  // G_t, at first squared
  double exponents = 0, norms = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto row = rows.subspan(i * width, width);
    const double m = std::abs(multiplier[i]);
    exponents += m * power_of_largest(row);
    double square = 0;
    for (std::size_t l = 0; l <= i; ++l) {
      const auto other = rows.subspan(l * width, width);
      const double pair = m * std::abs(multiplier[l]) * (l == i ? 1 : 2);
      double dot = 0;
      for (int t = 0; t < steps; ++t) {
        for (int d = t * kWgmmaStep; d < (t + 1) * kWgmmaStep; ++d) dot += static_cast<double>(row[d]) * other[d];
        prefix_norm[t] += pair * std::abs(dot);
      }
      square = dot;
    }
    norms += m * std::max(std::sqrt(square), kSmallestExponent);
  }
  for (double& g : prefix_norm) g = std::sqrt(g);  // the dots of E4M3 values are exact
  return wgmma_allowance(exponents, norms, prefix_norm, steps);
}

}  // namespace dosa
