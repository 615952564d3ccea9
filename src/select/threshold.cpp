#include "select/threshold.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/numeric.hpp"

namespace dosa {

float guess_threshold(const float* values, std::int64_t n, std::int64_t want,
                      std::span<std::uint32_t, kThresholdSample> scratch, const hwy::Sorter& sorter) {
  if (want >= n) return -std::numeric_limits<float>::infinity();
  const std::int64_t sampled = std::min<std::int64_t>(n, kThresholdSample);
  for (std::int64_t i = 0; i < sampled; ++i) {
    const float value = values[i * n / sampled];
    scratch[static_cast<std::size_t>(i)] = std::isnan(value) ? 0 : order_code(value);
  }
  const std::int64_t rank = std::min(want * sampled / n, sampled - 1);
  sorter(scratch.data(), static_cast<std::size_t>(sampled), hwy::SortAscending());  // in less time than std::nth_element
  const std::uint32_t code = scratch[static_cast<std::size_t>(rank)];
  return code == 0 ? std::numeric_limits<float>::infinity() : score_of_code(code);
}

}  // namespace dosa
