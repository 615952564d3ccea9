#include "decode/recent.hpp"

#include <algorithm>

namespace dosa {

namespace {

// Whether ascending `sorted` holds `id`. Halves without branches: half of them would be mispredicted.
bool holds(std::span<const std::int32_t> sorted, std::int32_t id) {
  const std::int32_t* at = sorted.data();
  for (std::size_t n = sorted.size(); n > 1; n -= n / 2) at += static_cast<std::size_t>(at[n / 2 - 1] < id) * (n / 2);
  return !sorted.empty() && *at == id;
}

}  // namespace

void remember(std::span<const std::int32_t> winners, std::span<std::int32_t> recent, std::span<std::int32_t> scratch,
              const hwy::Sorter& sorter) {
  winners = winners.first(std::min(winners.size(), recent.size()));
  const auto sorted = scratch.first(winners.size());
  std::ranges::copy(winners, sorted.begin());
  sorter(sorted.data(), sorted.size(), hwy::SortAscending());
  const std::size_t room = recent.size() - winners.size();
  std::size_t kept = 0;
  for (std::size_t i = 0; i < recent.size() && kept < room; ++i) {
    if (recent[i] >= 0 && !holds(sorted, recent[i])) recent[kept++] = recent[i];
  }
  const auto oldest = recent.begin() + static_cast<std::ptrdiff_t>(kept);
  const auto end = oldest + static_cast<std::ptrdiff_t>(winners.size());
  std::move_backward(recent.begin(), oldest, end);
  std::ranges::copy(winners, recent.begin());
  std::fill(end, recent.end(), -1);
}

}  // namespace dosa
