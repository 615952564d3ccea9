#include "certificate/certificate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/numeric.hpp"

// Section numbers in comments are those of certificate.md.

namespace dosa {
namespace {

using PerHead = std::array<double, kMaxHeads>;

// The rounding constants of section 4, all multiplied by Allowances::scale.
struct Rounding {
  double head_sum;  // reference head sum, relative to sum |w_h| [x_h]+
  double dot;       // a head's dot, per unit of ||q|| ||k||
  double aux_dot;   // an auxiliary row's dot
  double gram;      // an entry of the gram matrix and the f64 arithmetic on it
  double f64;       // relative error of any sum or product formed here in f64
  double scale;

  Rounding(const QueryHeads& query, int active, double s)
      : head_sum(s * gamma_n(active)),
        dot(s * gamma_n(query.dim - 1)),
        aux_dot(s * gamma_n(query.dim)),
        gram(s * (query.gram_error + 0x1p-38)),
        f64(s * 0x1p-40),
        scale(s) {}

  [[nodiscard]] double above(double x) const { return x + std::abs(x) * f64; }
  // Row j of `rows` in the screen's chain is rounded rows - j times, its start (j = -1) once more.
  [[nodiscard]] double chain(int j, int rows) const { return scale * gamma_n(rows - j); }
  [[nodiscard]] float up(double x) const { return scale > 0 ? round_up(x) : static_cast<float>(x); }
};

// Section 1: weights and norms of the heads that can contribute.
struct ActiveHeads {
  int count = 0;
  bool exempt = false;
  std::array<std::int16_t, kMaxHeads> index{};  // ascending
  PerHead norm{};                               // >= ||q_h||, 0 for an inactive head
  double total = 0;                             // >= sum |w_h| ||q_h||
};

ActiveHeads find_active(const QueryHeads& query) {
  ActiveHeads out;
  const double widen = 1 / (1 - query.gram_error);
  for (int h = 0; h < query.heads; ++h) {
    const float w = query.w[h];
    const float square = query.gram[static_cast<std::size_t>(h) * query.heads + h];
    if (!std::isfinite(w) || !std::isfinite(square)) {
      out.exempt = true;
      return out;
    }
    if (w == 0.0F || square == 0.0F) continue;
    out.norm[h] = std::sqrt(static_cast<double>(square) * widen) * (1 + 0x1p-50);
    out.total += std::abs(static_cast<double>(w)) * out.norm[h];
    out.index[out.count++] = static_cast<std::int16_t>(h);
  }
  out.exempt = out.total > 0x1p60;
  return out;
}

struct Split {
  std::array<std::int16_t, kMaxHeads> retained{}, positive{}, negative{};  // R, P, N
  int r = 0, p = 0, n = 0;
};

// The first heads of the ranking are retained. Where the form does badly without a positive head (or is not valid),
// positive heads come first while all of them fit.
Split split_heads(const QueryHeads& query, const ActiveHeads& active, const HeadRanking& ranking, int budget,
                  bool positive_first) {
  std::array<std::int16_t, kMaxHeads> order;
  std::array<bool, kMaxHeads> listed{};
  int count = 0;
  const auto list = [&](int h) {
    if (active.norm[h] > 0 && !listed[h]) order[count++] = static_cast<std::int16_t>(h);
    listed[h] = true;
  };
  int positives = 0;
  for (int a = 0; a < active.count; ++a) positives += query.w[active.index[a]] > 0.0F ? 1 : 0;
  if (positive_first && positives <= budget) {
    for (int a = 0; a < active.count; ++a) {
      if (query.w[active.index[a]] > 0.0F) list(active.index[a]);
    }
  }
  for (int i = 0; i < ranking.count; ++i) list(ranking.order[i]);
  for (int a = 0; a < active.count; ++a) list(active.index[a]);

  Split out;
  for (int i = 0; i < count; ++i) {
    const std::int16_t h = order[i];
    if (i < budget)
      out.retained[out.r++] = h;
    else if (query.w[h] > 0.0F)
      out.positive[out.p++] = h;
    else
      out.negative[out.n++] = h;
  }
  std::sort(out.retained.begin(), out.retained.begin() + out.r);
  return out;
}

// Section 3: which retained head each omitted positive head leans on, and by how much.
struct Anchors {
  std::array<std::int16_t, kMaxHeads> head{};  // -1: none
  PerHead beta{};                              // signed in the linear forms, >= 0 in the base form
};

Anchors choose_anchors(const QueryHeads& query, const ActiveHeads& active, const Split& split, bool linear, Ablation ablation) {
  Anchors out;
  out.head.fill(-1);
  if (ablation == Ablation::no_projection) return out;
  for (int i = 0; i < split.p; ++i) {
    const int h = split.positive[i];
    const float* row = query.gram.data() + static_cast<std::size_t>(h) * query.heads;
    double best = 0;
    for (int l = 0; l < split.r; ++l) {
      const int j = split.retained[l];
      const double dot = linear ? std::abs(static_cast<double>(row[j])) : static_cast<double>(row[j]);
      const double share = dot / active.norm[j];
      if (share > best) {
        best = share;
        out.head[h] = static_cast<std::int16_t>(j);
      }
    }
    if (out.head[h] < 0) continue;
    const int j = out.head[h];
    out.beta[h] = static_cast<double>(row[j]) / query.gram[static_cast<std::size_t>(j) * query.heads + j];
  }
  return out;
}

// Section 2, (3) and (4), with the errors of 4.5: E of the base form, or half of E' of the linear forms.
double joint_residual(const QueryHeads& query, const ActiveHeads& active, const Split& split, const Anchors& anchors,
                      const Rounding& rounding, bool linear) {
  if (split.p == 0) return 0;
  PerHead weight;                        // w_h (1 + g)
  std::array<double, kMaxHeads> fold{};  // beta of the i-th omitted head, 0 where it has no anchor
  std::array<int, kMaxHeads> anchor{};   // its anchor, any head where it has none
  double size = 0;                       // sum of weight_h (||q_h|| + |beta_h| ||q_j||), for the errors
  for (int i = 0; i < split.p; ++i) {
    const int h = split.positive[i];
    weight[i] = query.w[h] * (1 + rounding.head_sum);
    fold[i] = anchors.head[h] < 0 ? 0.0 : anchors.beta[h];
    anchor[i] = anchors.head[h] < 0 ? h : anchors.head[h];
    size += weight[i] * (active.norm[h] + std::abs(fold[i]) * active.norm[anchor[i]]);
  }
  double signed_sum = 0, absolute_sum = 0;
  for (int i = 0; i < split.p; ++i) {
    const int h = split.positive[i];
    const float* row_h = query.gram.data() + static_cast<std::size_t>(h) * query.heads;
    const float* row_j = query.gram.data() + static_cast<std::size_t>(anchor[i]) * query.heads;
    double row_signed = 0, row_absolute = 0;
    for (int k = 0; k <= i; ++k) {
      const int l = split.positive[k];
      const double to_head = static_cast<double>(row_h[l]) - fold[i] * row_j[l];
      const double to_anchor = static_cast<double>(row_h[anchor[k]]) - fold[i] * row_j[anchor[k]];
      const double product = weight[k] * (to_head - fold[k] * to_anchor);
      const double count = k == i ? 1 : 2;
      row_signed += count * product;
      row_absolute += count * std::abs(product);
    }
    signed_sum += weight[i] * row_signed;
    absolute_sum += weight[i] * row_absolute;
  }
  const double error = rounding.gram * size * size;
  const double root = std::sqrt(std::max(absolute_sum, 0.0) + error);
  if (linear) return rounding.above(0.5 * root);
  return rounding.above(0.5 * (std::sqrt(std::max(signed_sum, 0.0) + error) + root));
}

// Sections 3, 4.1 and 4.3: the bound's body before it meets the screen's arithmetic.
struct Body {
  PerHead coefficient{};                        // v_j of the retained heads
  PerHead magnitude{};                          // sum of the sizes of what v_j is summed from
  std::array<PerHead, kMaxAggregates> share{};  // auxiliary vector a = sum_h share[a][h] q_h
  double constant = 0;                          // C, what multiplies ||k||
  double leaned = 0;  // sum over A and P of |w_h| ||q_h||, and over anchors of the folded |w_h beta_h| ||q_j||
};

Body form_body(const QueryHeads& query, const ActiveHeads& active, const Split& split, const Anchors& anchors,
               const HeadGroups& group, const Rounding& rounding, bool linear) {
  Body out;
  for (int i = 0; i < split.r; ++i) {
    const int h = split.retained[i];
    const double w = query.w[h];
    out.coefficient[h] = w > 0 ? w * (1 + rounding.head_sum) : w * (1 - rounding.head_sum);
    out.magnitude[h] = std::abs(out.coefficient[h]);
  }
  for (int i = 0; i < split.p; ++i) {
    const int h = split.positive[i];
    const double w = query.w[h] * (1 + rounding.head_sum);
    const int j = anchors.head[h];
    out.leaned += w * active.norm[h];
    if (linear) out.share[0][h] -= 0.5 * w;
    if (j < 0) continue;
    const double fold = w * std::abs(anchors.beta[h]);
    out.coefficient[j] += fold;
    out.magnitude[j] += fold;
    out.leaned += fold * active.norm[j];
    if (linear) out.share[0][j] += 0.5 * fold;
  }
  for (int i = 0; i < split.n; ++i) {
    const int h = split.negative[i];
    if (group[h] < 0) continue;
    const double w = -static_cast<double>(query.w[h]) * (1 - rounding.head_sum);
    out.share[group[h]][h] += w;
    out.leaned += w * active.norm[h];
  }
  out.constant = joint_residual(query, active, split, anchors, rounding, linear) + rounding.dot * out.leaned;
  return out;
}

// Section 4.4: an auxiliary vector as an f32 row.
struct StoredRow {
  double norm = 0;  // >= ||row||
  double lost = 0;  // ||vector - row||
};

StoredRow store_row(const QueryHeads& query, const ActiveHeads& active, const PerHead& share, std::span<float> row,
                    const Rounding& rounding) {
  std::array<double, kMaxDim> vector{};
  for (int a = 0; a < active.count; ++a) {
    const int h = active.index[a];
    if (share[h] == 0) continue;
    const float* q = query.q.data() + static_cast<std::size_t>(h) * row.size();
    for (std::size_t d = 0; d < row.size(); ++d) vector[d] += share[h] * static_cast<double>(q[d]);
  }
  double square = 0, lost = 0;
  for (std::size_t d = 0; d < row.size(); ++d) {
    row[d] = static_cast<float>(vector[d]);
    const double rest = vector[d] - static_cast<double>(row[d]);
    square += static_cast<double>(row[d]) * row[d];
    lost += rest * rest;
  }
  return {rounding.above(std::sqrt(square)), rounding.scale * rounding.above(std::sqrt(lost))};
}

}  // namespace

Certificate build_certificate(const QueryHeads& query, const CertificateChoice& choice, const PanelDots& panel,
                              std::span<float> aux_rows, const Allowances& allowances) {
  return build_certificate(query, rank_heads(query, panel), choice, panel, aux_rows, allowances);
}

Certificate build_certificate(const QueryHeads& query, const HeadRanking& ranking, const CertificateChoice& choice,
                              const PanelDots& panel, std::span<float> aux_rows, const Allowances& allowances) {
  Certificate out;
  out.form = choice.form == Form::automatic ? Form::extended : choice.form;
  const bool linear = out.form != Form::base;
  const int aggregates = linear ? 1 : std::clamp(choice.aggregates, 0, kMaxAggregates);

  const ActiveHeads active = find_active(query);
  out.exempt = active.exempt;
  if (out.exempt || active.count == 0) return out;
  const int budget = std::clamp(choice.retained, 0, kMaxBoundRows - aggregates);
  const Split split = split_heads(query, active, ranking, budget, out.form != Form::extended);
  out.exempt = out.form == Form::absolute && split.p > 0;
  if (out.exempt) return out;

  const Rounding rounding(query, active.count, allowances.scale);
  const std::span<const std::int16_t> negative{split.negative.data(), static_cast<std::size_t>(split.n)};
  HeadGroups group =
      linear ? group_for_linear(ranking, negative) : group_for_relu(query, ranking, panel, negative, aggregates);
  if (choice.ablation == Ablation::no_aggregate) group.fill(-1);
  if (choice.ablation == Ablation::all_aggregated) {
    for (const int h : negative) group[h] = std::max<std::int8_t>(group[h], 0);
  }
  const Anchors anchors = choose_anchors(query, active, split, linear, choice.ablation);
  const Body body = form_body(query, active, split, anchors, group, rounding, linear);

  // Auxiliary rows; a vector that is zero needs none.
  const auto dim = static_cast<std::size_t>(query.dim);
  std::array<double, kMaxAggregates> aux_norm{};
  int aux = 0;
  double c = body.constant;
  for (int a = 0; a < aggregates; ++a) {
    const StoredRow stored = store_row(query, active, body.share[a], aux_rows.subspan(aux * dim, dim), rounding);
    c += stored.lost;
    if (stored.norm == 0) continue;
    aux_norm[aux] = stored.norm;
    for (int h = 0; h < query.heads; ++h) out.aux_share[aux][h] = static_cast<float>(body.share[a][h]);
    ++aux;
  }
  out.retained = split.r;
  out.rows = split.r + aux;
  out.linear_rows = linear ? aux : 0;

  // Section 4.2: weights take what the screen's chain may lose.
  const auto seal = [&](int j, double value) {
    const double loss = rounding.chain(j, out.rows);
    return rounding.up(rounding.above(value >= 0 ? value / (1 - loss) : value / (1 + loss)));
  };
  bool finite = true;
  for (int j = 0; j < split.r; ++j) {
    const int h = split.retained[j];
    out.head[j] = static_cast<std::int16_t>(h);
    out.weight[j] = seal(j, body.coefficient[h] + body.magnitude[h] * rounding.f64);
    finite = finite && std::isfinite(out.weight[j]);
  }
  for (int a = 0; a < aux; ++a) {
    const int j = split.r + a;
    out.weight[j] = linear ? -1.0F : seal(j, -1.0);
    c += (rounding.aux_dot + (linear ? rounding.chain(j, out.rows) * (1 + rounding.aux_dot) : 0.0)) * aux_norm[a];
  }

  // Sections 4.5 to 4.7: f64 sums, underflow, and the norm's unit.
  c += rounding.scale * 0x1p-44 * (active.total + body.leaned);
  c += rounding.scale * 0x1p-143 * (active.count + out.rows + 1 + aux * query.dim);
  out.c = rounding.up(rounding.above(c * std::sqrt(static_cast<double>(dim)) / (1 - rounding.chain(-1, out.rows))));
  out.exempt = !finite || !std::isfinite(out.c);
  return out;
}

float bound_reference(const Certificate& certificate, std::span<const float> rows, std::span<const float> key,
                      float rho) {
  float u = certificate.c * rho;
  for (int j = 0; j < certificate.rows; ++j) {
    const float* row = rows.data() + static_cast<std::size_t>(j) * key.size();
    float dot = 0;
    for (std::size_t d = 0; d < key.size(); ++d) dot = std::fma(row[d], key[d], dot);
    const bool linear = j >= certificate.rows - certificate.linear_rows;
    u = std::fma(certificate.weight[j], linear ? dot : relu(dot), u);
  }
  return u;
}

void predict_bounds(const Certificate& certificate, const PanelDots& panel, std::span<const float> rho,
                    std::span<float> u) {
  constexpr int kBlock = 64;
  for (int first = 0; first < panel.keys; first += kBlock) {
    const int count = std::min(kBlock, panel.keys - first);
    std::array<float, kBlock> sum{}, x{};
    // A short last block is padded through `x`, so that every arithmetic loop has a constant length.
    const auto load = [&](int h) -> const float* {
      const float* dots = panel.x + static_cast<std::ptrdiff_t>(h) * panel.stride + first;
      if (count == kBlock) return dots;
      std::copy_n(dots, count, x.begin());
      return x.data();
    };
    for (int i = 0; i < count; ++i) sum[i] = certificate.c * rho[first + i];
    for (int j = 0; j < certificate.retained; ++j) {
      const float* dots = load(certificate.head[j]);
      const float weight = certificate.weight[j];
      for (int i = 0; i < kBlock; ++i) sum[i] += weight * relu(dots[i]);
    }
    for (int j = certificate.retained; j < certificate.rows; ++j) {
      const auto& share = certificate.aux_share[j - certificate.retained];
      std::array<float, kBlock> dot{};
      for (int h = 0; h < kMaxHeads; ++h) {
        if (share[h] == 0.0F) continue;
        const float* dots = load(h);
        for (int i = 0; i < kBlock; ++i) dot[i] += share[h] * dots[i];
      }
      const float weight = certificate.weight[j];
      const bool linear = j >= certificate.rows - certificate.linear_rows;
      for (int i = 0; i < kBlock; ++i) sum[i] += weight * (linear ? dot[i] : relu(dot[i]));
    }
    std::copy_n(sum.begin(), count, u.begin() + first);
  }
}

}  // namespace dosa
