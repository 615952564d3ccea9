// A value that about `want` of n values reach, guessed from a sample.
#pragma once

#include <cstdint>
#include <span>

#include <hwy/contrib/sort/vqsort.h>

namespace dosa {

inline constexpr int kThresholdSample = 2048;

/// NaN counts as the largest value, as a bound that proves nothing. The result is a guess: callers count what they collect.
float guess_threshold(const float* values, std::int64_t n, std::int64_t want,
                      std::span<std::uint32_t, kThresholdSample> scratch, const hwy::Sorter& sorter);

}  // namespace dosa
