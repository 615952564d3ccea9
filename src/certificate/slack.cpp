#include "certificate/slack.hpp"

#include <algorithm>
#include <array>

namespace dosa {

Slack decompose_slack(const Certificate& plain, const QueryHeads& query, std::span<const float> dots, float rho,
                      float u) {
  const auto on = [&](int h) { return dots[h] > 0.0F ? static_cast<double>(dots[h]) : 0.0; };
  const auto x = [&](int h) { return dots[h] == dots[h] ? static_cast<double>(dots[h]) : 0.0; };
  std::array<bool, kMaxHeads> retained{};
  Slack out;

  // Anchors carry more than their own weight.
  out.projection = static_cast<double>(plain.c) * rho;
  for (int j = 0; j < plain.retained; ++j) {
    const int h = plain.head[j];
    retained[h] = true;
    out.projection += (static_cast<double>(plain.weight[j]) - query.w[h]) * on(h);
  }
  for (int h = 0; h < query.heads; ++h) {
    if (!retained[h] && query.w[h] > 0.0F) out.projection -= query.w[h] * on(h);
  }

  std::array<bool, kMaxHeads> aggregated{};
  for (int j = plain.retained; j < plain.rows; ++j) {
    const auto& share = plain.aux_share[j - plain.retained];
    const bool linear = j >= plain.rows - plain.linear_rows;
    double sum_on = 0, sum_off = 0;
    for (int h = 0; h < query.heads; ++h) {
      if (share[h] == 0.0F) continue;
      if (retained[h] || query.w[h] > 0.0F) {  // the linear half of omitted positive heads and of their anchors
        out.projection -= share[h] * x(h);
        continue;
      }
      aggregated[h] = true;
      const double w = -static_cast<double>(query.w[h]);
      sum_on += w * on(h);
      sum_off += w * (on(h) - x(h));
    }
    out.aggregate += linear ? sum_off : std::min(sum_on, sum_off);
  }
  for (int h = 0; h < query.heads; ++h) {
    if (!retained[h] && !aggregated[h] && query.w[h] < 0.0F) out.left_out -= query.w[h] * on(h);
  }

  double s = 0;
  for (int h = 0; h < query.heads; ++h) s += static_cast<double>(query.w[h]) * on(h);
  out.allowances = static_cast<double>(u) - s - out.projection - out.left_out - out.aggregate;
  return out;
}

}  // namespace dosa
