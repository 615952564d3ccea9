// Forming groups, loading queries, and where rows go.
#include "backend/cpu/group.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/dtype.hpp"

namespace dosa::cpu {

Scratch::Scratch(Carver& carver, const ScratchSizes& sizes) {
  const std::int64_t tile = sizes.tile_queries;
  const std::int64_t dim = sizes.dim;
  const std::int64_t heads = sizes.heads;
  const std::int64_t padded_heads = round_up_to(sizes.heads, kRowGroup);
  panel = carver.take<float>(dim * kPanelKeys);
  integer_panel = carver.take<std::uint32_t>(dim / 4 * kPanelKeys);
  panel_summaries = {carver.take<float>(kPanelKeys), carver.take<float>(kPanelKeys), carver.take<float>(kPanelKeys)};
  key_copies = carver.take<std::uint8_t>(dim * kPanelKeys);
  q = carver.take<float>(tile * padded_heads * dim);
  w = carver.take<float>(tile * heads);
  bounds = carver.take<float>(tile * sizes.slice_keys);
  positions = carver.take<std::int32_t>(sizes.slice_keys);
  ordered = carver.take<Record>(sizes.slice_keys);
  sample = carver.take<std::uint32_t>(kThresholdSample);
  records = carver.take<Record>(tile * sizes.record_capacity);
  // The rest serves screening.
  const std::int64_t screened = sizes.panel_keys == 0 ? 0 : 1;
  const std::int64_t sampled = sizes.panel_keys;
  bound_rows = carver.take<float>(screened * tile * kMaxBoundRows * dim);
  row_offsets = carver.take<std::int32_t>(screened * tile * kMaxBoundRows);
  witnesses = carver.take<std::int32_t>(screened * tile * sizes.witness_capacity);
  winners = carver.take<std::int32_t>(screened * sizes.winner_capacity);
  q_rows = carver.take<float>(screened * tile * heads * dim);
  gram = carver.take<float>(screened * tile * heads * heads);
  dots = carver.take<float>(tile * heads * sampled);
  focus = carver.take<std::int32_t>(tile * sampled);
  panel_ids = carver.take<std::int32_t>(sampled);
  panel_alpha = carver.take<float>(sampled);
  panel_rho = carver.take<float>(sampled);
  panel_rho_e = carver.take<float>(sampled);
  panel_u = carver.take<float>(sampled);
  aux_rows = carver.take<float>(screened * kMaxAggregates * dim);
  integer_rows = carver.take<std::int8_t>(screened * kMaxBoundRows * dim);
}

void CpuGroup::enter_request(std::int32_t slot, std::int64_t row) {
  if (slot == slot_) return;
  slot_ = slot;
  winners_ = 0;  // another request's, which say nothing about this one
  keys_ = {KeyRows(context_.problem, request_of(context_.problem, row)), context_.plan.shape.nk, dim()};
  if (!context_.summaries.present()) return;
  const std::int64_t at = slot * context_.summary_stride;
  summaries_ = context_.summaries.from(at);
}

std::int64_t CpuGroup::assign(std::int64_t row, std::int64_t end, int part) {
  enter_request(context_.slots[row], row);
  const std::int64_t nk = keys_.count;
  count_ = 0;
  part_ = part;
  sliced_ = false;
  VisibleRange all{nk, 0};
  VisibleRange common{0, nk};
  for (; row < end && count_ < context_.sizes.tile_queries; ++row) {
    if (context_.slots[row] != slot_) break;
    bool clamped = false;
    const VisibleRange visible = visible_range(context_.problem, row, &clamped);
    if (visible.size() > 0) {
      // Queries share every decoded panel of the group: keep those together that see mostly the same keys.
      const VisibleRange hull{std::min(all.begin, visible.begin), std::max(all.end, visible.end)};
      const VisibleRange meet{std::max(common.begin, visible.begin), std::min(common.end, visible.end)};
      if (count_ > 0 && all.size() > 0 && 2 * meet.size() < hull.size()) break;
      all = hull;
      common = meet;
    }
    QueryState& query = queries_[count_++];
    query = QueryState{};
    query.row = row;
    query.all = query.visible = visible;
    if (part == 0) {
      ++stats_.rows;
      stats_.clamped_rows += clamped ? 1 : 0;
      stats_.visible += visible.size();
    }
    load_query(query);
  }
  cut(all);
  return row;
}

// This part of the keys: panels are cut between parts, not within. The plan knows how many keys there may be; a group that sees
// few of them has fewer parts.
void CpuGroup::cut(VisibleRange all) {
  if (context_.plan.key_parts == 1) return;
  const std::int64_t begin = all.begin / kPanelKeys;
  const std::int64_t panels = (all.end + kPanelKeys - 1) / kPanelKeys - begin;
  const std::int64_t parts = std::clamp<std::int64_t>(all.size() / kShortestPart, 1, context_.plan.key_parts);
  const auto cut_at = [&](std::int64_t part) { return (begin + panels * std::min(part, parts) / parts) * kPanelKeys; };
  for (QueryState& query : queries()) query.visible = meet(query.visible, {cut_at(part_), cut_at(part_ + 1)});
}

void CpuGroup::load_query(QueryState& query) {
  query.path = path_of(query);
  query.report.path = query.path;
  query.report.visible = query.visible.size();
  query.report.seed_tau = query.report.tau = -std::numeric_limits<float>::infinity();
  const auto capacity = static_cast<std::size_t>(context_.sizes.record_capacity);
  query.records = RecordBuffer({scratch_.records + static_cast<std::size_t>(index_of(query)) * capacity, capacity},
                               context_.plan.shape.topk);
  if (query.path == Path::empty) return;

  const std::int64_t padded_heads = round_up_to(heads(), kRowGroup);
  float* packed = scratch_.q + index_of(query) * padded_heads * dim();
  float* w = scratch_.w + index_of(query) * heads();
  std::fill(packed + (padded_heads - kRowGroup) * dim(), packed + padded_heads * dim(), 0.0F);
  for (int head = 0; head < heads(); ++head) {
    const auto* bytes = context_.problem.q.at<std::uint8_t>(query.row, head);
    const std::int64_t stride = context_.problem.q.stride[2];
    float* out = packed + head / kRowGroup * kRowGroup * dim() + head % kRowGroup;
    for (int i = 0; i < dim(); ++i) out[i * kRowGroup] = kE4m3Table[bytes[i * stride]];
    w[head] = *context_.problem.w.at<float>(query.row, head);
  }
}

Path CpuGroup::path_of(const QueryState& query) const {
  const std::int64_t visible = query.visible.size();
  if (visible == 0) return Path::empty;
  if (visible <= context_.plan.shape.topk) return Path::short_row;
  switch (options().method) {
    case Method::dense:
    case Method::fused: return Path::full;
    case Method::dosa: return Path::dosa;
    case Method::automatic: return visible < options().min_context ? Path::full_context : Path::dosa;
  }
  return Path::full;
}

// Every visible key of a short row wins; in id order and without scores there is nothing to compute.
bool CpuGroup::is_identity(const QueryState& query) const noexcept {
  return query.path == Path::short_row && options().order == Order::ascending && !context_.out.scores.present();
}

bool CpuGroup::is_scored_in_full(const QueryState& query) const noexcept {
  return query.path != Path::empty && query.path != Path::dosa && !is_identity(query);
}

bool CpuGroup::next_slice() {
  const VisibleRange all = hull_of([](const QueryState& query) { return query.path == Path::dosa; });
  const std::int64_t begin = sliced_ ? slice_.end : all.begin;
  sliced_ = true;
  slice_ = {begin, std::min(all.end, begin + context_.sizes.slice_keys)};
  return slice_.size() > 0;
}

}  // namespace dosa::cpu
