#include "seed/seed.hpp"

#include <algorithm>

#include "base/mutation.hpp"

namespace dosa {
namespace {

// Appends `count` keys spread evenly over [begin, end); at most one per key.
std::int64_t append_spread(VisibleRange range, std::int64_t count, std::int32_t* out) {
  count = std::min(count, range.size());
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<std::int32_t>(range.begin + i * range.size() / count);
  }
  return count;
}

}  // namespace

std::int64_t nearest_spread_witnesses(VisibleRange visible, std::int32_t topk, std::span<std::int32_t> out) {
  const std::int64_t first_near = std::max(visible.begin, visible.end - topk);
  std::int64_t count = append_spread({visible.begin, first_near}, topk, out.data());
  for (std::int64_t key = first_near; key < visible.end; ++key) out[static_cast<std::size_t>(count++)] = static_cast<std::int32_t>(key);
  return count;
}

std::int64_t chain_witnesses(VisibleRange visible, std::int32_t topk, std::span<const std::int32_t> winners,
                             std::int32_t near, std::span<std::int32_t> out, const hwy::Sorter& sorter) {
  std::int64_t count = 0;
  for (const std::int32_t key : winners) {
    if (visible.contains(key)) out[static_cast<std::size_t>(count++)] = key;
  }
  for (std::int64_t key = std::max(visible.begin, visible.end - near); key < visible.end; ++key) {
    out[static_cast<std::size_t>(count++)] = static_cast<std::int32_t>(key);
  }
  const auto distinct = [&] {
    sorter(out.data(), static_cast<std::size_t>(count), hwy::SortAscending());
    if (!mutated(Mutation::duplicate_witnesses)) count = std::unique(out.data(), out.data() + count) - out.data();
  };
  distinct();
  const std::int64_t wanted = topk + near / 2;
  if (count < wanted) {
    count += append_spread(visible, std::min<std::int64_t>(topk, 2 * (wanted - count)), out.data() + count);
    distinct();
  }
  return count;
}

}  // namespace dosa
