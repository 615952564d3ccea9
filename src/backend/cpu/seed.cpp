// Witnesses scored in full.
#include <algorithm>

#include "backend/cpu/group.hpp"
#include "backend/cpu/timer.hpp"

namespace dosa::cpu {

void CpuGroup::seed() {
  if (context_.seeds == SeedPolicy::largest_bounds) return;  // refine takes its witnesses from the screen
  ScopedTimer timer(stats_.seconds_seed);
  for (QueryState& query : queries()) {
    if (query.path != Path::dosa) continue;
    const auto capacity = static_cast<std::size_t>(context_.sizes.witness_capacity);
    const std::span<std::int32_t> witnesses{scratch_.witnesses + static_cast<std::size_t>(index_of(query)) * capacity, capacity};
    const std::int32_t topk = context_.plan.shape.topk;
    query.witnesses = context_.seeds == SeedPolicy::nearest_spread
                          ? nearest_spread_witnesses(query.visible, topk, witnesses)
                          : chain_witnesses(query.visible, topk, suggested_winners(query), witnesses);
    score_keys(query, witnesses.first(static_cast<std::size_t>(query.witnesses)));
    query.records.compact();
    query.report.seed_tau = query.records.tau();
    query.report.seeds = query.witnesses;
    stats_.seeds += query.witnesses;
  }
}

// The caller's hints for this query, else the winners of this worker's last group.
std::span<const std::int32_t> CpuGroup::suggested_winners(const QueryState& query) {
  const TensorView& hints = context_.problem.hints;
  if (!hints.present()) return {scratch_.winners, static_cast<std::size_t>(winners_)};
  const std::int64_t row = hints.shape[0] == 1 ? 0 : query.row;
  const std::int64_t count = std::min(hints.shape[1], context_.sizes.winner_capacity);
  for (std::int64_t i = 0; i < count; ++i) scratch_.winners[i] = *hints.at<std::int32_t>(row, i);
  return {scratch_.winners, static_cast<std::size_t>(count)};
}

}  // namespace dosa::cpu
