// Certificates of a group: panel, choice by predicted work, rows packed for the kernels.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cpu/group.hpp"
#include "backend/cpu/timer.hpp"
#include "base/numeric.hpp"

namespace dosa::cpu {
namespace {

// Predicted work above which a group is scored in full: the prediction errs by a few percent.
constexpr double kTooLoose = 0.93;

bool is_screened(const QueryState& query) { return query.path == Path::dosa; }

}  // namespace

void CpuGroup::certify() {
  VisibleRange common{0, context_.keys.count};
  bool any = false;
  for (const QueryState& query : queries()) {
    if (!is_screened(query)) continue;
    common = meet(common, query.visible);
    any = true;
  }
  if (!any) return;
  ScopedTimer timer(stats_.seconds_certify);
  sample_panel(common);
  for (QueryState& query : queries()) {
    if (is_screened(query)) measure(query);
  }
  CertificateChoice choice;
  const PredictedWork work = choose(choice);
  const bool too_loose = options().method == Method::automatic && work.total > kTooLoose;
  for (QueryState& query : queries()) {
    if (!is_screened(query)) continue;
    query.report.predicted_work = static_cast<float>(work.total);
    if (part_ == 0) {
      stats_.predicted_work += work.total;
      stats_.planned_rows += 1;
    }
    if (too_loose) {
      query.path = Path::full_loose;
    } else {
      build(query, choice);
    }
    query.report.path = query.path;
  }
}

// Evenly spread keys that every screened query of the group sees, and their dots with every head.
void CpuGroup::sample_panel(VisibleRange common) {
  const std::int64_t wanted = std::min<std::int64_t>(context_.sizes.panel_keys, common.size());
  panel_keys_ = static_cast<int>(wanted);
  for (std::int64_t i = 0; i < wanted; ++i) {
    const std::int64_t key = common.begin + (2 * i + 1) * common.size() / (2 * wanted);
    scratch_.panel_ids[i] = static_cast<std::int32_t>(key);
    scratch_.panel_alpha[i] = context_.summaries.alpha[key];
    // Exempt keys survive whatever the certificate; in a prediction they would only be noise.
    scratch_.panel_rho[i] = std::isinf(context_.summaries.rho[key]) ? 0.0F : context_.summaries.rho[key];
  }
  const std::uint8_t* rows[kPanelKeys];
  const std::int64_t stride = context_.sizes.panel_keys;
  for (std::int64_t at = 0; at < wanted; at += kPanelKeys) {
    const auto batch = static_cast<std::size_t>(std::min<std::int64_t>(kPanelKeys, wanted - at));
    context_.keys.load({scratch_.panel_ids + at, batch}, scratch_.key_copies, rows);
    pack_panel(rows);
    for (const QueryState& query : queries()) {
      if (!is_screened(query)) continue;
      context_.kernels.dot_panel(scratch_.panel, packed_q(query), dim(), heads(), dots_of(query) + at, stride);
    }
  }
}

// Panel scores (statistics only, not in the reference order), tau as the panel shows it, and the keys that matter.
void CpuGroup::measure(QueryState& query) {
  const std::int64_t stride = context_.sizes.panel_keys;
  const float* w = scratch_.w + index_of(query) * heads();
  const float* dots = dots_of(query);
  float* scores = scratch_.panel_scores + index_of(query) * stride;
  std::fill(scores, scores + panel_keys_, 0.0F);
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
  const auto better = [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; };
  const int quarter = (panel_keys_ + 3) / 4;
  std::nth_element(focus, focus + quarter - 1, focus + panel_keys_, better);
  const double share = static_cast<double>(context_.plan.shape.topk) / static_cast<double>(query.visible.size());
  const int rank = std::clamp(static_cast<int>(std::lround(share * panel_keys_)), 1, quarter);
  std::nth_element(focus, focus + rank - 1, focus + quarter, better);
  query.panel_tau = std::max(query.records.tau(), scores[focus[rank - 1]]);

  // Gram matrix of the heads, by the same kernels: heads are keys here.
  const TensorView& q = context_.problem.q;
  TensorView head_rows{q.at<std::uint8_t>(query.row), DType::f8_e4m3, Device::cpu, 2, {heads(), dim()}, {q.stride[1], q.stride[2]}};
  const KeySource head_keys{head_rows, {}, heads(), dim()};
  const std::uint8_t* rows[kPanelKeys];
  float block[kMaxHeads * kPanelKeys];
  float* gram = scratch_.gram + index_of(query) * heads() * heads();
  float* q_rows = scratch_.q_rows + index_of(query) * heads() * dim();
  for (int first = 0; first < heads(); first += kPanelKeys) {
    head_keys.load(first, heads(), scratch_.key_copies, rows);
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
}

PanelQuery CpuGroup::panel_query(const QueryState& query) const {
  const std::int64_t at = index_of(query);
  const auto h = static_cast<std::size_t>(heads());
  const auto keys = static_cast<std::size_t>(panel_keys_);
  PanelQuery sample;
  sample.query = {.heads = heads(),
                  .dim = dim(),
                  .q = {scratch_.q_rows + at * heads() * dim(), h * static_cast<std::size_t>(dim())},
                  .w = {scratch_.w + at * heads(), h},
                  .gram = {scratch_.gram + at * heads() * heads(), h * h},
                  .gram_error = gamma_n(dim())};
  sample.dots = {.keys = panel_keys_,
                 .stride = static_cast<int>(context_.sizes.panel_keys),
                 .x = dots_of(query),
                 .focus = {scratch_.focus + at * context_.sizes.panel_keys, (keys + 3) / 4}};
  sample.rho = {scratch_.panel_rho, keys};
  sample.alpha = {scratch_.panel_alpha, keys};
  sample.tau = query.panel_tau;
  return sample;
}

// The cheapest choice for two queries of the group.
PredictedWork CpuGroup::choose(CertificateChoice& choice) {
  const QueryState* samples[2] = {};
  for (const QueryState& query : queries()) {
    if (!is_screened(query)) continue;
    if (samples[0] == nullptr) samples[0] = &query;
    samples[1] = &query;
  }
  float aux[kMaxAggregates * kMaxDim];
  const std::span<float> u{scratch_.panel_u, static_cast<std::size_t>(panel_keys_)};
  PredictedWork best{0, 1, std::numeric_limits<double>::infinity()};
  const auto consider = [&](const CertificateChoice& candidate) {
    PredictedWork mean;
    for (const QueryState* sample : samples) {
      const PredictedWork work = predict_work(panel_query(*sample), candidate, context_.prices, u, aux);
      mean.rows += work.rows / 2;
      mean.survivors += work.survivors / 2;
      mean.total += work.total / 2;
    }
    if (mean.total < best.total) {
      best = mean;
      choice = candidate;
    }
  };
  const CertificateOptions& wanted = options().certificate;
  for (int rows = kRowGroup; rows <= std::min(kMaxBoundRows, round_up_to(heads(), kRowGroup)); rows += kRowGroup) {
    if (wanted.row_budget > 0 && rows != round_up_to(wanted.row_budget, kRowGroup)) continue;
    const int budget = wanted.row_budget > 0 ? wanted.row_budget : rows;
    if (wanted.form == Form::automatic || wanted.form == Form::extended) consider({Form::extended, budget - 1, 1});
    if (wanted.form == Form::absolute) consider({Form::absolute, budget - 1, 1});
    if (wanted.form == Form::automatic || wanted.form == Form::base) {
      for (int groups = 1; groups <= std::min(kMaxAggregates, budget); ++groups) {
        if (wanted.aggregates > 0 && groups != wanted.aggregates) continue;
        consider({Form::base, budget - groups, groups});
      }
    }
  }
  return best;
}

void CpuGroup::build(QueryState& query, const CertificateChoice& choice) {
  float aux[kMaxAggregates * kMaxDim];
  const PanelQuery sample = panel_query(query);
  query.certificate = build_certificate(sample.query, choice, sample.dots, aux);
  const Certificate& certificate = query.certificate;
  if (certificate.exempt) {
    query.path = Path::full_exempt;
    return;
  }
  query.report.form = certificate.form;
  query.report.precision = ScreenPrecision::f32;
  query.report.retained = certificate.retained;
  query.report.bound_rows = certificate.rows;
  stats_.bound_rows += part_ == 0 ? certificate.rows : 0;
  float* packed = scratch_.bound_rows + index_of(query) * kMaxBoundRows * dim();
  std::fill_n(packed, round_up_to(certificate.rows, kRowGroup) * dim(), 0.0F);
  for (int row = 0; row < certificate.rows; ++row) {
    const float* from = row < certificate.retained
                            ? sample.query.q.data() + certificate.head[static_cast<std::size_t>(row)] * dim()
                            : aux + (row - certificate.retained) * dim();
    float* to = packed + row / kRowGroup * kRowGroup * dim() + row % kRowGroup;
    for (int i = 0; i < dim(); ++i) to[i * kRowGroup] = from[i];
  }
}

}  // namespace dosa::cpu
