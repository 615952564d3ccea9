// Where a bound gives away what: U - s of one key, split exactly.
#pragma once

#include <span>

#include "certificate/certificate.hpp"

namespace dosa {

/// Parts of u - sum_h w_h [x_h]+, raw (before alpha). They sum to it up to f64 rounding; only `allowances` may be
/// negative, by the rounding of one f32 sum.
struct Slack {
  double projection = 0;  // omitted positive heads: what anchors and the norm bound claim above sum_P w_h [x_h]+
  double left_out = 0;    // omitted negative heads outside every aggregate that are on
  double aggregate = 0;   // relu: min( sum_A |w_h| [x_h]+, sum_A |w_h| [-x_h]+ ) per group; linear: sum_A |w_h| [-x_h]+
  double allowances = 0;  // numeric allowances and their outward rounding

  [[nodiscard]] double total() const noexcept { return projection + left_out + aggregate + allowances; }
};

/// `plain` is the same certificate built with Allowances{0}, `dots` the exact or reference dots of all heads with the
/// key, u what the screen computed. Cost: O(heads * (1 + aggregates)).
Slack decompose_slack(const Certificate& plain, const QueryHeads& query, std::span<const float> dots, float rho,
                      float u);

}  // namespace dosa
