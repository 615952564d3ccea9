// Certificates of a group: sampled keys, the choice by predicted work, rows packed for the kernels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/group.hpp"
#include "backend/cpu/timer.hpp"
#include "base/numeric.hpp"

namespace dosa::cpu {
namespace {

// Predicted work above which a group is scored in full: predictions err by several percent.
constexpr double kTooLoose = 0.9;
constexpr double kPlanningKeys = 2500;
// After each group that was too loose in a row, twice as many go unplanned: neighbours are alike, and planning costs time.
constexpr int kMostUnplanned = 16;
// Best panel scores from which tau is read or, where K of N is rarer than the panel resolves, extrapolated.
constexpr int kTailScores = 32;
// Queries of a group whose predicted work decides for all of it.
constexpr std::size_t kPlannedQueries = 3;

bool is_screened(const QueryState& query) { return query.path == Path::dosa && query.visible.size() > 0; }

// The score at rank share * n of n sampled scores. Ranks below 8 are too noisy to read; the tail of the best scores is close
// to exponential, so tau goes up by the same step whenever the rank is halved.
float tail_score(std::span<float> scores, double share) {
  const auto n = static_cast<int>(scores.size());
  const double rank = share * n;
  const auto at = [&](int r) {
    std::nth_element(scores.begin(), scores.begin() + r - 1, scores.end(), std::greater<>());
    return scores[static_cast<std::size_t>(r - 1)];
  };
  constexpr int least = kTailScores / 4;
  if (rank >= least || n < kTailScores) return at(std::clamp(static_cast<int>(std::lround(rank)), 1, n));
  const float low = at(kTailScores);
  const float high = at(least);
  if (!std::isfinite(low) || !std::isfinite(high)) return high;
  return high + (high - low) * static_cast<float>(std::log(least / std::max(rank, 0.1)) / std::log(kTailScores / least));
}

}  // namespace

void CpuGroup::certify() {
  VisibleRange common{0, keys_.count};
  QueryState* list[max_queries];
  std::size_t count = 0;
  for (QueryState& query : queries()) {
    if (!is_screened(query)) continue;
    common = meet(common, query.visible);
    list[count++] = &query;
  }
  if (count == 0) return;
  ScopedTimer timer(stats_.seconds_certify);
  const std::span<QueryState* const> screened{list, count};
  const bool may_give_up = options().method == Method::automatic;
  if (may_give_up && unplanned_groups_ > 0) {
    --unplanned_groups_;
    give_up(screened);
    return;
  }
  sample_keys(common);
  SampledQuery samples[max_queries];
  SampledQuery planned[kPlannedQueries];
  const std::size_t planned_count = std::min<std::size_t>(kPlannedQueries, count);
  const auto planned_at = [&](std::size_t i) { return (2 * i + 1) * count / (2 * planned_count); };
  for (std::size_t i = 0; i < planned_count; ++i) planned[i] = samples[planned_at(i)] = sample_query(*screened[planned_at(i)]);
  const ChosenCertificate chosen = choose_certificate({planned, planned_count}, options().certificate, context_.prices, plan_,
                                                      prediction_scratch());
  plan_ = chosen.plan;
  // Planning costs as much as scoring so many keys in full, whatever the range.
  const double work = chosen.work.total + kPlanningKeys / static_cast<double>(common.size());
  for (QueryState* query : screened) query->report.predicted_work = static_cast<float>(work);
  if (part_ == 0) {
    stats_.predicted_work += work * static_cast<double>(count);
    stats_.planned_rows += static_cast<double>(count);
  }
  if (may_give_up && work > kTooLoose) {
    unplanned_groups_ = std::min(kMostUnplanned, 1 << loose_groups_++);
    give_up(screened);
    return;
  }
  loose_groups_ = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (samples[i].query.heads == 0) samples[i] = sample_query(*screened[i]);
    build(*screened[i], samples[i]);
    screened[i]->report.path = screened[i]->path;
  }
}

void CpuGroup::give_up(std::span<QueryState* const> screened) {
  for (QueryState* query : screened) query->report.path = query->path = Path::full_loose;
}

PredictionScratch CpuGroup::prediction_scratch() const noexcept {
  return {.u = {scratch_.panel_u, static_cast<std::size_t>(panel_keys_)},
          .aux = {scratch_.aux_rows, static_cast<std::size_t>(kMaxAggregates * dim())},
          .integer_rows = {scratch_.integer_rows, static_cast<std::size_t>(kMaxBoundRows * dim())}};
}

// Evenly spread keys that every screened query of the group sees.
void CpuGroup::sample_keys(VisibleRange common) {
  const std::int64_t count = std::min<std::int64_t>(context_.sizes.panel_keys, common.size());
  panel_keys_ = static_cast<int>(count);
  for (std::int64_t i = 0; i < count; ++i) {
    scratch_.panel_ids[i] = static_cast<std::int32_t>(common.begin + (2 * i + 1) * common.size() / (2 * count));
  }
  const KeySummaries sampled{scratch_.panel_alpha, scratch_.panel_rho, scratch_.panel_rho_e};
  for (std::int64_t at = 0; at < count; at += kPanelKeys) {
    const std::span<const std::int32_t> ids{scratch_.panel_ids + at, static_cast<std::size_t>(std::min<std::int64_t>(kPanelKeys, count - at))};
    if (summaries_.present()) {
      for (std::size_t i = 0; i < ids.size(); ++i) sampled.from(at).copy(i, summaries_, ids[i]);
      continue;
    }
    const std::uint8_t* rows[kPanelKeys];
    float scales[kPanelKeys];
    keys_.load(ids, scratch_.key_copies, rows);
    keys_.load_scales(ids, scales);
    summarize_panel(context_.kernels, dim(), rows, scales, sampled.from(at));
  }
  // Exempt keys survive whatever the certificate; in a prediction they would only be noise.
  std::replace(sampled.rho, sampled.rho + count, std::numeric_limits<float>::infinity(), 0.0F);
}

// Dots of one query's heads with the sampled keys, and what they say: tau, the keys that matter, the heads that matter.
SampledQuery CpuGroup::sample_query(QueryState& query) {
  const std::int64_t stride = context_.sizes.panel_keys;
  float* dots = scratch_.dots + index_of(query) * heads() * stride;
  const std::uint8_t* rows[kPanelKeys];
  for (std::int64_t at = 0; at < panel_keys_; at += kPanelKeys) {
    const auto batch = static_cast<std::size_t>(std::min<std::int64_t>(kPanelKeys, panel_keys_ - at));
    keys_.load({scratch_.panel_ids + at, batch}, scratch_.key_copies, rows);
    pack_panel(rows);
    context_.kernels.dot_panel(scratch_.panel, packed_q(query), dim(), heads(), dots + at, stride);
  }

  // Statistics only, so not in the reference order.
  const float* w = scratch_.w + index_of(query) * heads();
  float* scores = scratch_.panel_u;
  std::fill_n(scores, panel_keys_, 0.0F);
  for (int head = 0; head < heads(); ++head) {
    const float* x = dots + head * stride;
    for (int i = 0; i < panel_keys_; ++i) scores[i] += w[head] * relu(x[i]);
  }
  std::int32_t* focus = scratch_.focus + index_of(query) * stride;
  for (int i = 0; i < panel_keys_; ++i) {
    scores[i] *= scratch_.panel_alpha[i];
    if (std::isnan(scores[i])) scores[i] = -std::numeric_limits<float>::infinity();
    focus[i] = i;
  }
  const int quarter = (panel_keys_ + 3) / 4;
  std::nth_element(focus, focus + quarter - 1, focus + panel_keys_,
                   [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });

  SampledQuery sample;
  sample.query = load_heads(query);
  sample.dots = {.keys = panel_keys_,
                 .stride = static_cast<int>(stride),
                 .x = dots,
                 .focus = {focus, static_cast<std::size_t>(quarter)},
                 .rho = {scratch_.panel_rho, static_cast<std::size_t>(panel_keys_)}};
  sample.alpha = {scratch_.panel_alpha, static_cast<std::size_t>(panel_keys_)};
  sample.rho_e = {scratch_.panel_rho_e, static_cast<std::size_t>(panel_keys_)};
  sample.ranking = rank_heads(sample.query, sample.dots);
  const double share = static_cast<double>(context_.plan.shape.topk) / static_cast<double>(query.visible.size());
  sample.tau = std::max(query.records.tau(), tail_score({scores, static_cast<std::size_t>(panel_keys_)}, share));
  return sample;
}

// Row-major heads and their Gram matrix, by the same kernels: heads are keys here.
QueryHeads CpuGroup::load_heads(const QueryState& query) {
  const TensorView& q = context_.problem.q;
  const TensorView rows_of_q{q.at<std::uint8_t>(query.row), DType::f8_e4m3,           Device::cpu, 2,
                             {heads(), dim()},              {q.stride[1], q.stride[2]}};
  const KeySource source{KeyRows(rows_of_q), heads(), dim()};
  const std::uint8_t* rows[kPanelKeys];
  float block[kMaxHeads * kPanelKeys];
  float* gram = scratch_.gram + index_of(query) * heads() * heads();
  float* q_rows = scratch_.q_rows + index_of(query) * heads() * dim();
  for (int first = 0; first < heads(); first += kPanelKeys) {
    source.load(first, heads(), scratch_.key_copies, rows);
    pack_panel(rows);
    context_.kernels.dot_panel(scratch_.panel, packed_q(query), dim(), heads(), block, kPanelKeys);
    const int columns = std::min(kPanelKeys, heads() - first);
    for (int head = 0; head < heads(); ++head) {
      std::copy_n(block + head * kPanelKeys, columns, gram + head * heads() + first);
    }
    for (int column = 0; column < columns; ++column) {
      for (int i = 0; i < dim(); ++i) q_rows[(first + column) * dim() + i] = scratch_.panel[i * kPanelKeys + column];
    }
  }
  const auto h = static_cast<std::size_t>(heads());
  return {.heads = heads(),
          .dim = dim(),
          .q = {q_rows, h * static_cast<std::size_t>(dim())},
          .w = {scratch_.w + index_of(query) * heads(), h},
          .gram = {gram, h * h},
          .gram_error = gamma_n(dim())};
}

void CpuGroup::build(QueryState& query, const SampledQuery& sample) {
  const PredictionScratch scratch = prediction_scratch();
  Certificate& certificate = query.certificate;
  certificate = build_certificate(sample.query, sample.ranking, plan_.choice, sample.dots, scratch.aux);
  bool exempt = certificate.exempt;
  int rows = certificate.rows;
  if (!exempt && plan_.precision == ScreenPrecision::i8) {
    query.integer = make_integer(certificate, sample.query, scratch.aux, scratch.integer_rows);
    exempt = query.integer.exempt;
    rows = query.integer.rows;
  }
  if (exempt) {
    query.path = Path::full_exempt;
    return;
  }
  query.report.form = certificate.form;
  query.report.precision = plan_.precision;
  query.report.retained = certificate.retained;
  query.report.bound_rows = rows;
  if (part_ == 0) stats_.bound_rows += rows;
  if (plan_.precision == ScreenPrecision::i8) {
    pack_integer_rows(query);
  } else {
    pack_rows(query, sample.query);
  }
}

void CpuGroup::pack_rows(const QueryState& query, const QueryHeads& heads_of_query) {
  const Certificate& certificate = query.certificate;
  float* packed = bound_rows_of(query);
  std::fill_n(packed, round_up_to(certificate.rows, kRowGroup) * dim(), 0.0F);
  for (int row = 0; row < certificate.rows; ++row) {
    const float* from = row < certificate.retained
                            ? heads_of_query.q.data() + certificate.head[static_cast<std::size_t>(row)] * dim()
                            : scratch_.aux_rows + (row - certificate.retained) * dim();
    float* to = packed + row / kRowGroup * kRowGroup * dim() + row % kRowGroup;
    for (int i = 0; i < dim(); ++i) to[i * kRowGroup] = from[i];
  }
}

void CpuGroup::pack_integer_rows(const QueryState& query) {
  auto* packed = reinterpret_cast<std::uint32_t*>(bound_rows_of(query));
  std::int32_t* offset = row_offsets_of(query);
  const int words = dim() / 4;
  const int padded = round_up_to(query.integer.rows, kRowGroup);
  for (int row = 0; row < padded; ++row) {
    const std::int8_t* from = scratch_.integer_rows + row * dim();
    std::uint32_t* to = packed + row / kRowGroup * kRowGroup * words + row % kRowGroup;
    const bool real = row < query.integer.rows;
    std::int32_t sum = 0;
    for (int word = 0; word < words; ++word) {
      std::uint32_t four = 0;
      if (real) std::memcpy(&four, from + 4 * word, 4);
      to[word * kRowGroup] = four;
    }
    for (int i = 0; real && i < dim(); ++i) sum += from[i];
    offset[row] = -128 * sum;  // the kernel's keys are k8 + 128
  }
}

}  // namespace dosa::cpu
