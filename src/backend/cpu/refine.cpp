// Screening and refinement on the CPU: bounds of a slice are kept, so that the largest can be refined first.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "backend/cpu/group.hpp"
#include "backend/cpu/timer.hpp"

namespace dosa::cpu {
namespace {

constexpr std::int32_t kRefineChunk = 4 * kPanelKeys;  // keys between two looks at tau

}  // namespace

void CpuGroup::screen() {
  ScopedTimer timer(stats_.seconds_screen);
  visit_panels(
      slice_, [](const QueryState& query) { return query.path == Path::dosa; },
      [&](std::int64_t first, const std::uint8_t* const* rows) { pack_panel_to_screen(first, rows); },
      [&](QueryState& query, std::int64_t first) {
        const KeySummaries& summaries = summaries_.present() ? summaries_.from(first) : scratch_.panel_summaries;
        bound_panel(query, summaries, bounds_of(query) + (first - slice_.begin));
      });
}

void CpuGroup::pack_panel_to_screen(std::int64_t first, const std::uint8_t* const* rows) {
  const bool integer = plan_.precision == ScreenPrecision::i8;
  const KeySummaries& summaries = scratch_.panel_summaries;
  if (summaries_.present()) {
    if (integer) {
      context_.kernels.pack_panel_i8(rows, dim(), scratch_.integer_panel);
    } else {
      pack_panel(rows);
    }
    return;
  }
  if (integer) {
    context_.kernels.pack_and_norm_panel_i8(rows, dim(), scratch_.integer_panel, summaries.rho, summaries.rho_e);
  } else {
    pack_panel(rows);
    context_.kernels.norm_panel(scratch_.panel, dim(), summaries.rho, summaries.rho_e);
  }
  float scales[kPanelKeys];
  keys_.load_scales(first, scales);
  stats_.exempt += std::popcount(exempt_odd_keys(scales, summaries));
}

void CpuGroup::bound_panel(const QueryState& query, const KeySummaries& summaries, float* bounds) const {
  if (plan_.precision == ScreenPrecision::i8) {
    const IntegerCertificate& certificate = query.integer;
    context_.kernels.bound_panel_i8({.panel = scratch_.integer_panel,
                                     .row_data = reinterpret_cast<const std::uint32_t*>(bound_rows_of(query)),
                                     .offset = row_offsets_of(query),
                                     .weight = certificate.weight.data(),
                                     .alpha = summaries.alpha,
                                     .rho = summaries.rho,
                                     .rho_e = summaries.rho_e,
                                     .dim = dim(),
                                     .rows = certificate.rows,
                                     .linear_rows = certificate.linear_rows,
                                     .c = certificate.c,
                                     .c_e = certificate.c_e},
                                    bounds);
    return;
  }
  const Certificate& certificate = query.certificate;
  context_.kernels.bound_panel({.panel = scratch_.panel,
                                .row_data = bound_rows_of(query),
                                .weight = certificate.weight.data(),
                                .alpha = summaries.alpha,
                                .rho = summaries.rho,
                                .dim = dim(),
                                .rows = certificate.rows,
                                .linear_rows = certificate.linear_rows,
                                .c = certificate.c},
                               bounds);
}

void CpuGroup::refine() {
  ScopedTimer timer(stats_.seconds_refine);
  for (QueryState& query : queries()) {
    const VisibleRange range = meet(query.visible, slice_);
    if (query.path == Path::dosa && range.size() > 0) refine_query(query, range);
  }
}

// Largest bounds first. Before tau is known, the keys with the largest bounds are the best witnesses there are; then
// U < tau rejects.
void CpuGroup::refine_query(QueryState& query, VisibleRange range) {
  const float* bounds = bounds_of(query) + (range.begin - slice_.begin);
  const std::int64_t n = range.size();
  const std::int64_t k = query.records.k();
  std::int32_t* positions = scratch_.positions;
  const auto survivors = [&](std::int64_t count) {
    count = drop_witnesses(query, range.begin, count);
    stats_.survivors += count;
    query.report.survivors += count;
    return count;
  };
  stats_.screened += n;
  if (query.records.tau() > -std::numeric_limits<float>::infinity()) {
    const std::int64_t count = survivors(context_.kernels.collect_at_least(bounds, n, query.records.least_bound(), positions));
    refine_best_first(query, bounds, range.begin, count);
    return;
  }
  float high = -std::numeric_limits<float>::infinity();
  std::int64_t count = 0;
  for (std::int64_t want = k + k / 4; count < k; want *= 2) {
    high = guess_threshold(bounds, n, want, threshold_sample(), sorter_);
    count = context_.kernels.collect_at_least(bounds, n, high, positions);
    if (want >= n) break;
  }
  refine_all(query, range.begin, survivors(count));
  query.records.compact();
  count = survivors(context_.kernels.collect_between(bounds, n, query.records.least_bound(), high, positions));
  refine_best_first(query, bounds, range.begin, count);
}

// Witnesses are records already and must not be recorded twice. Positions and witnesses both ascend.
std::int64_t CpuGroup::drop_witnesses(const QueryState& query, std::int64_t first, std::int64_t count) const {
  const std::int32_t* witness = scratch_.witnesses + index_of(query) * context_.sizes.witness_capacity;
  const std::int32_t* end = witness + query.witnesses;
  std::int32_t* positions = scratch_.positions;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    while (witness != end && *witness < first + positions[i]) ++witness;
    if (witness == end || *witness != first + positions[i]) positions[kept++] = positions[i];
  }
  return kept;
}

// Every collected key, in the order of the keys.
void CpuGroup::refine_all(QueryState& query, std::int64_t first, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) scratch_.positions[i] += static_cast<std::int32_t>(first);
  score_keys(query, {scratch_.positions, static_cast<std::size_t>(count)});
  stats_.refined += count;
  query.report.refined += count;
}

// The collected keys from the largest bound down, until tau has risen above the rest.
void CpuGroup::refine_best_first(QueryState& query, const float* bounds, std::int64_t first, std::int64_t count) {
  Record* ordered = scratch_.ordered;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t at = scratch_.positions[i];
    ordered[i] = make_record(std::isnan(bounds[at]) ? std::numeric_limits<float>::infinity() : bounds[at], at);
  }
  sorter_(ordered, static_cast<std::size_t>(count), hwy::SortAscending());

  // tau rises whenever the records are compacted, which costs about as much as scoring a few hundred keys.
  const std::int32_t full = query.records.k() + std::max(kRefineChunk, query.records.k() / 2);
  std::int32_t ids[kRefineChunk];
  std::int64_t done = 0;
  while (done < count && !(score_of(ordered[done]) < query.records.least_bound())) {
    const std::int64_t chunk = std::min<std::int64_t>(kRefineChunk, count - done);
    for (std::int64_t i = 0; i < chunk; ++i) ids[i] = static_cast<std::int32_t>(first + id_of(ordered[done + i]));
    score_keys(query, {ids, static_cast<std::size_t>(chunk)});
    done += chunk;
    if (query.records.size() >= full) query.records.compact();
  }
  stats_.refined += done;
  query.report.refined += done;
}

}  // namespace dosa::cpu
