#include "select/threshold.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/numeric.hpp"

namespace dosa {

float guess_threshold(const float* values, std::int64_t n, std::int64_t want,
                      std::span<std::uint32_t, kThresholdSample> scratch) {
  if (want >= n) return -std::numeric_limits<float>::infinity();
  const std::int64_t sampled = std::min<std::int64_t>(n, kThresholdSample);
  for (std::int64_t i = 0; i < sampled; ++i) {
    const float value = values[i * n / sampled];
    scratch[static_cast<std::size_t>(i)] = std::isnan(value) ? 0 : order_code(value);
  }
  const std::int64_t rank = std::min(want * sampled / n, sampled - 1);
  const auto nth = scratch.begin() + rank;
  std::nth_element(scratch.begin(), nth, scratch.begin() + sampled);
  return *nth == 0 ? std::numeric_limits<float>::infinity() : score_of_code(*nth);
}

}  // namespace dosa
