// Every test is named after the public report it comes from: the kind and number of the list that tests/README.md
// keeps.
#pragma once

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "support/cases.hpp"
#include "support/check.hpp"

namespace dosa::test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

using Scores = std::vector<float>;
using Ids = std::vector<std::int32_t>;

/// score_of(0), score_of(1), ...
template <typename F>
Scores scores_of(int count, F score_of) {
  Scores scores;
  for (int i = 0; i < count; ++i) scores.push_back(score_of(i));
  return scores;
}

/// x moved up by n units in the last place; x > 0.
inline float ulps_above(float x, int n) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) + static_cast<std::uint32_t>(n));
}

inline float uniform(Random& random, float low, float high) {
  return std::uniform_real_distribution<float>(low, high)(random);
}

/// A permutation of 0..count-1.
inline std::vector<int> shuffled(int count, std::uint64_t seed) {
  std::vector<int> order(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) order[static_cast<std::size_t>(i)] = i;
  std::shuffle(order.begin(), order.end(), Random(seed));
  return order;
}

/// every_method, and certificates that have to leave heads out.
std::vector<Options> many_ways();

/// The fastest implementation only, for inputs that would be slow otherwise.
std::vector<Options> fast_ways();

inline void expect_exact_scores(const Scores& scores, std::int32_t topk, std::int64_t nq = 1) {
  expect_exact(explicit_scores(scores, topk, nq).problem(), many_ways());
}

/// Results of `times` runs are identical, with new plans and workspaces each time.
void expect_repeatable(const Problem& problem, const Options& options, int times);

}  // namespace dosa::test
