// Which keys become witnesses.
//
// A witness is scored in full before any bound is compared; with at least K of them, all distinct and visible, the K-th
// best witness score is a tau that cannot exceed the true K-th score. Bad witnesses cost time, never correctness. Exactly K
// would be a poor choice: tau would be the minimum of the witnesses.
#pragma once

#include <cstdint>
#include <span>

#include <hwy/contrib/sort/vqsort.h>

#include "base/keys.hpp"

namespace dosa {

/// Most witnesses that any policy returns for `winners` suggested keys.
constexpr std::int64_t max_witnesses(std::int32_t topk, std::int64_t winners) noexcept { return winners + 2 * std::int64_t{topk}; }

/// K nearest (last visible) keys and K keys spread evenly over the rest. Ascending; returns how many.
std::int64_t nearest_spread_witnesses(VisibleRange visible, std::int32_t topk, std::span<std::int32_t> out);

/// Suggested winners (any order, repeats and invisible ids allowed), the `near` nearest keys (0..K), and, while these are fewer
/// than K + near / 2, evenly spread ones. Ascending, distinct, visible; returns how many.
std::int64_t chain_witnesses(VisibleRange visible, std::int32_t topk, std::span<const std::int32_t> winners,
                             std::int32_t near, std::span<std::int32_t> out, const hwy::Sorter& sorter);
/// The same with the K nearest.
inline std::int64_t chain_witnesses(VisibleRange visible, std::int32_t topk, std::span<const std::int32_t> winners,
                                    std::span<std::int32_t> out, const hwy::Sorter& sorter) {
  return chain_witnesses(visible, topk, winners, topk, out, sorter);
}

}  // namespace dosa
