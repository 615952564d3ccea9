// Which keys become witnesses.
//
// A witness is scored in full before any bound is compared; with at least K of them, all distinct and visible, the K-th
// best witness score is a tau that cannot exceed the true K-th score. Bad witnesses cost time, never correctness. Exactly K
// would be a poor choice: tau would be the minimum of the witnesses.
#pragma once

#include <cstdint>
#include <span>

namespace dosa {

struct VisibleRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t size() const noexcept { return end > begin ? end - begin : 0; }
  [[nodiscard]] bool contains(std::int64_t key) const noexcept { return key >= begin && key < end; }
};

/// Most witnesses that any policy returns for `winners` suggested keys.
constexpr std::int64_t max_witnesses(std::int32_t topk, std::int64_t winners) noexcept { return winners + 2 * std::int64_t{topk}; }

/// K nearest (last visible) keys and K keys spread evenly over the rest. Ascending; returns how many.
std::int64_t nearest_spread_witnesses(VisibleRange visible, std::int32_t topk, std::span<std::int32_t> out);

/// Suggested winners (any order, repeats and invisible ids allowed), the K nearest keys, and, while these are fewer than
/// 3/2 K, evenly spread ones. Ascending, distinct, visible; returns how many.
std::int64_t chain_witnesses(VisibleRange visible, std::int32_t topk, std::span<const std::int32_t> winners,
                             std::span<std::int32_t> out);

}  // namespace dosa
