// Witnesses scored in full.
#include <algorithm>

#include "backend/cpu/group.hpp"
#include "backend/cpu/timer.hpp"

namespace dosa::cpu {

void CpuGroup::seed() {
  if (context_.seeds == SeedPolicy::largest_bounds) return;  // refine takes its witnesses from the screen
  ScopedTimer timer(stats_.seconds_seed);
  for (QueryState& query : queries()) {
    if (query.path != Path::dosa || query.visible.size() == 0) continue;
    if (context_.shared_seeds.records != nullptr) {
      take_shared_seeds(query);
    } else {
      const std::span<const std::int32_t> witnesses = choose_witnesses(query);
      score_keys(query, witnesses);
      stats_.seeds += query.witnesses;
    }
    if (query.witnesses == 0) continue;
    query.records.compact();
    // tau is of all that the query sees, so that parts need not find K good keys each; other parts record their own
    // keys.
    query.records.keep([&](std::int32_t key) { return query.visible.contains(key); });
    query.report.seed_tau = query.records.tau();
    query.report.seeds = query.witnesses;
  }
}

void CpuGroup::share_seeds() {
  ScopedTimer timer(stats_.seconds_seed);
  const std::int64_t parts = context_.plan.key_parts;
  for (QueryState& query : queries()) {
    if (query.path != Path::dosa) continue;
    const std::span<const std::int32_t> witnesses = choose_witnesses(query);
    const std::int64_t begin = query.witnesses * part_ / parts;
    const std::int64_t end = query.witnesses * (part_ + 1) / parts;
    score_keys(query, witnesses.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
    const std::span<const Record> scored = query.records.records();
    DOSA_INVARIANT(static_cast<std::int64_t>(scored.size()) == end - begin);  // nothing fell out: buffers hold more than 2 K
    std::ranges::copy(scored, context_.shared_seeds.records + query.row * context_.sizes.witness_capacity + begin);
    if (part_ == 0) context_.shared_seeds.counts[query.row] = static_cast<std::int32_t>(query.witnesses);
    stats_.seeds += end - begin;
  }
}

void CpuGroup::take_shared_seeds(QueryState& query) {
  const std::int64_t capacity = context_.sizes.witness_capacity;
  query.witnesses = context_.shared_seeds.counts[query.row];
  const Record* records = context_.shared_seeds.records + query.row * capacity;
  std::int32_t* witnesses = scratch_.witnesses + index_of(query) * capacity;
  for (std::int64_t i = 0; i < query.witnesses; ++i) {
    witnesses[i] = id_of(records[i]);
    query.records.push(score_of(records[i]), witnesses[i]);
  }
}

// None where there is nothing to chain to, as in the first step of a request: the screen finds better witnesses than any that are
// guessed.
std::span<std::int32_t> CpuGroup::choose_witnesses(QueryState& query) {
  const std::span<const std::int32_t> suggested = suggested_winners(query);
  const auto seen = std::ranges::count_if(suggested, [&](std::int32_t key) { return query.all.contains(key); });
  query.witnesses = 0;
  if (context_.may_start_from_bounds && seen == 0) return {};
  const auto capacity = static_cast<std::size_t>(context_.sizes.witness_capacity);
  const std::span<std::int32_t> witnesses{scratch_.witnesses + static_cast<std::size_t>(index_of(query)) * capacity, capacity};
  const std::int32_t topk = context_.plan.shape.topk;
  // Enough winners need few others: the keys that have come since.
  const std::int32_t near = seen < topk ? topk : topk / 8;
  query.witnesses = context_.seeds == SeedPolicy::nearest_spread
                        ? nearest_spread_witnesses(query.all, topk, witnesses)
                        : chain_witnesses(query.all, topk, suggested, near, witnesses, sorter_);
  return witnesses.first(static_cast<std::size_t>(query.witnesses));
}

// The caller's hints for this query, else the request's recent winners, else the winners of this worker's last group.
std::span<const std::int32_t> CpuGroup::suggested_winners(const QueryState& query) {
  const TensorView& hints = context_.problem.hints;
  const MutableTensorView& recent = context_.out.recent;
  const auto take = [&](const auto& ids, std::int64_t row) -> std::span<const std::int32_t> {
    const std::int64_t count = std::min(ids.shape[1], context_.sizes.winner_capacity);
    for (std::int64_t i = 0; i < count; ++i) scratch_.winners[i] = *ids.template at<std::int32_t>(row, i);
    return {scratch_.winners, static_cast<std::size_t>(count)};
  };
  if (hints.present()) return take(hints, hint_row(context_.problem, query.row));
  if (recent.present()) return take(recent, request_of(context_.problem, query.row));
  return {scratch_.winners, static_cast<std::size_t>(winners_)};
}

}  // namespace dosa::cpu
