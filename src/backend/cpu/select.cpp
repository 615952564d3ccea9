// Records to ids.
#include <algorithm>
#include <limits>

#include "backend/cpu/group.hpp"
#include "backend/cpu/timer.hpp"

namespace dosa::cpu {
namespace {

// A record with the id in the high bits, so that sorting is by id; nothing is lost.
constexpr Record by_id(Record record) noexcept {
  return ((record & 0xFFFFFFFEU) << 32) | ((record >> 32) << 1) | (record & 1U);
}
constexpr Record by_score(Record record) noexcept {
  return ((record & 0x1FFFFFFFEU) << 31) | ((record >> 33) << 1) | (record & 1U);
}

}  // namespace

void write_row(const Plan& plan, const Selection& out, const hwy::Sorter& sorter, std::int64_t row,
               std::span<Record> records) {
  if (plan.options.order == Order::ascending) {
    std::transform(records.begin(), records.end(), records.begin(), by_id);
    sorter(records.data(), records.size(), hwy::SortAscending());
    std::transform(records.begin(), records.end(), records.begin(), by_score);
  }

  const auto count = static_cast<std::int32_t>(records.size());
  for (std::int32_t i = 0; i < plan.shape.topk; ++i) {
    *out.ids.at<std::int32_t>(row, i) = i < count ? id_of(records[static_cast<std::size_t>(i)]) : -1;
  }
  if (!out.scores.present()) return;
  for (std::int32_t i = 0; i < plan.shape.topk; ++i) {
    *out.scores.at<float>(row, i) =
        i < count ? score_of(records[static_cast<std::size_t>(i)]) : -std::numeric_limits<float>::infinity();
  }
}

void CpuGroup::select() {
  ScopedTimer timer(stats_.seconds_select);
  for (QueryState& query : queries()) {
    if (is_identity(query)) {
      for (std::int64_t key = query.visible.begin; key < query.visible.end; ++key) query.records.push(0.0F, static_cast<std::int32_t>(key));
    }
    query.records.sort([&](Record* first, std::size_t count) { sorter_(first, count, hwy::SortAscending()); });
    query.report.tau = query.records.tau();
    stats_.compactions += query.records.compactions();
    const std::span<Record> records = query.records.records();
    if (context_.part_records != nullptr) {
      const std::int64_t slot = query.row * context_.plan.key_parts + part_;
      std::copy(records.begin(), records.end(), context_.part_records + slot * context_.plan.shape.topk);
      context_.part_counts[slot] = query.records.size();
    } else {
      write_row(context_.plan, context_.out, sorter_, query.row, records);
    }
    if (part_ == 0) count_path(query.path);
    if (!context_.reports.empty() && part_ == 0) context_.reports[static_cast<std::size_t>(query.row)] = query.report;
  }
  const bool told = context_.problem.hints.present() || context_.out.recent.present();
  if (context_.seeds == SeedPolicy::chain && !told && count_ > 0) keep_winners(queries_[count_ - 1]);
}

void CpuGroup::keep_winners(QueryState& query) {
  winners_ = 0;
  for (const Record record : query.records.records()) scratch_.winners[winners_++] = id_of(record);
}

void CpuGroup::count_path(Path path) {
  PathCounts& paths = stats_.path;
  switch (path) {
    case Path::empty: ++paths.empty; break;
    case Path::short_row: ++paths.short_rows; break;
    case Path::dosa: ++paths.dosa; break;
    case Path::full: ++paths.full; break;
    case Path::full_context: ++paths.full_context; break;
    case Path::full_loose: ++paths.full_loose; break;
    case Path::full_exempt: ++paths.full_exempt; break;
  }
}

}  // namespace dosa::cpu
