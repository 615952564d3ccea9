#include "decode/recent.hpp"

#include <algorithm>

namespace dosa {

void remember(std::span<const std::int32_t> winners, std::span<std::int32_t> recent, std::span<std::int32_t> scratch) {
  winners = winners.first(std::min(winners.size(), recent.size()));
  const auto sorted = scratch.first(winners.size());
  std::ranges::copy(winners, sorted.begin());
  std::ranges::sort(sorted);
  const auto out = [&](std::int32_t id) { return id < 0 || std::ranges::binary_search(sorted, id); };
  const auto kept = std::remove_if(recent.begin(), recent.end(), out);
  const auto room = static_cast<std::ptrdiff_t>(recent.size() - winners.size());
  const auto oldest = recent.begin() + std::min(kept - recent.begin(), room);
  const auto end = recent.begin() + static_cast<std::ptrdiff_t>(winners.size()) + (oldest - recent.begin());
  std::move_backward(recent.begin(), oldest, end);
  std::ranges::copy(winners, recent.begin());
  std::fill(end, recent.end(), -1);
}

}  // namespace dosa
