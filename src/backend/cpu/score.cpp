// The one scorer, and full scoring with it. Dense, seed and refine all come here, so their bits cannot differ.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cpu/group.hpp"
#include "backend/cpu/timer.hpp"

namespace dosa::cpu {

void CpuGroup::pack_panel(const std::uint8_t* const* rows) const { context_.kernels.pack_panel(rows, dim(), scratch_.panel); }

void CpuGroup::score_panel(const QueryState& query, const float* scale, float* scores) const {
  context_.kernels.score_panel({.panel = scratch_.panel,
                                .q = packed_q(query),
                                .w = scratch_.w + index_of(query) * heads(),
                                .k_scale = scale,
                                .dim = dim(),
                                .heads = heads()},
                               scores);
}

// Any keys, gathered into panels.
void CpuGroup::score_keys(QueryState& query, std::span<const std::int32_t> ids) {
  const std::uint8_t* rows[kPanelKeys];
  float scale[kPanelKeys];
  float scores[kPanelKeys];
  for (std::size_t at = 0; at < ids.size(); at += kPanelKeys) {
    const auto batch = ids.subspan(at, std::min<std::size_t>(kPanelKeys, ids.size() - at));
    const std::size_t next = at + batch.size();
    keys_.prefetch(ids.subspan(next, std::min<std::size_t>(kPanelKeys, ids.size() - next)));
    keys_.load(batch, scratch_.key_copies, rows);
    keys_.load_scales(batch, scale);
    pack_panel(rows);
    score_panel(query, scale, scores);
    for (std::size_t i = 0; i < batch.size(); ++i) query.records.push(scores[i], batch[i]);
  }
}

void CpuGroup::score_in_full() {
  ScopedTimer timer(stats_.seconds_score);
  for (QueryState& query : queries()) {
    if (!is_scored_in_full(query)) continue;
    query.records.clear();  // witnesses of a row that fell back are scored again; tau still holds
    stats_.full += query.visible.size();
  }
  if (options().method == Method::fused) {
    score_streamed();
  } else {
    score_stored();
  }
}

template <class Visit>
void CpuGroup::visit_full_panels(VisibleRange range, const Visit& visit) {
  float scale[kPanelKeys];
  visit_panels(
      range, [&](const QueryState& query) { return is_scored_in_full(query); },
      [&](std::int64_t first, const std::uint8_t* const* rows) {
        pack_panel(rows);
        keys_.load_scales(first, scale);
      },
      [&](QueryState& query, std::int64_t first) { visit(query, first, scale); });
}

// dense, and every fallback to it: the scores of a slice are kept, then the best are taken.
void CpuGroup::score_stored() {
  const VisibleRange hull = hull_of([&](const QueryState& query) { return is_scored_in_full(query); });
  for (std::int64_t begin = hull.begin; begin < hull.end; begin += context_.sizes.slice_keys) {
    const VisibleRange slice{begin, std::min(hull.end, begin + context_.sizes.slice_keys)};
    visit_full_panels(slice, [&](QueryState& query, std::int64_t first, const float* scale) {
      score_panel(query, scale, bounds_of(query) + (first - slice.begin));
    });
    for (QueryState& query : queries()) {
      const VisibleRange range = meet(query.visible, slice);
      if (is_scored_in_full(query) && range.size() > 0) take_scores(query, bounds_of(query) + (range.begin - slice.begin), range);
    }
  }
}

// Pushes every score that may be among the K best.
void CpuGroup::take_scores(QueryState& query, const float* scores, VisibleRange range) {
  const std::int64_t k = query.records.k();
  float low = query.records.tau();
  std::int64_t count = -1;
  // Without a tau yet, any value that K scores reach is one.
  for (std::int64_t want = k + k / 8 + 64; low == -std::numeric_limits<float>::infinity() && count < k; want *= 2) {
    const float guess = guess_threshold(scores, range.size(), want, threshold_sample(), sorter_);
    count = context_.kernels.collect_at_least(scores, range.size(), guess, scratch_.positions);
    if (want >= range.size()) break;
    // A NaN is collected with every guess, but proves nothing.
    const auto is_nan = [&](std::int32_t at) { return std::isnan(scores[at]); };
    if (count - std::count_if(scratch_.positions, scratch_.positions + count, is_nan) < k) count = -1;
  }
  if (count < 0) count = context_.kernels.collect_at_least(scores, range.size(), low, scratch_.positions);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t at = scratch_.positions[i];
    query.records.push(scores[at], static_cast<std::int32_t>(range.begin + at));
  }
}

// fused: scores are compared with a running tau and never kept.
void CpuGroup::score_streamed() {
  const VisibleRange hull = hull_of([&](const QueryState& query) { return is_scored_in_full(query); });
  float scores[kPanelKeys];
  visit_full_panels(hull, [&](QueryState& query, std::int64_t first, const float* scale) {
    score_panel(query, scale, scores);
    const VisibleRange range = meet(query.visible, {first, first + kPanelKeys});
    const float* visible = scores + (range.begin - first);
    const std::int64_t count =
        context_.kernels.collect_at_least(visible, range.size(), query.records.tau(), scratch_.positions);
    for (std::int64_t i = 0; i < count; ++i) {
      query.records.push(visible[scratch_.positions[i]], static_cast<std::int32_t>(range.begin + scratch_.positions[i]));
    }
  });
}

}  // namespace dosa::cpu
