// Made-up problems are what they claim to be.
#include "io/synth.hpp"

#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "base/dtype.hpp"
#include "score/reference.hpp"

namespace dosa {
namespace {

TEST(Synth, ExplicitScoresAreExact) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> scores = {1.0F, -1.0F, 0.0F, -0.0F, 1e-42F, -1e-45F, 3.4e38F, inf, -inf, 0.1F};
  const Activations a = with_scores(scores, 2, 5, 64);
  ASSERT_EQ(a.nq, 2);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    for (std::size_t row = 0; row < 2; ++row) {
      const float score =
          reference_score(ReferenceScorer::cpu, std::span(a.q).subspan(row * 5 * 64, 5 * 64),
                          std::span(a.w).subspan(row * 5, 5), std::span(a.k).subspan(i * 64, 64), a.k_scale[i]);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(score), std::bit_cast<std::uint32_t>(scores[i])) << scores[i];
    }
  }
}

TEST(Synth, RandomFamilyKeepsItsShares) {
  const Activations a = random_activations(3, 500, 20, 32, {.positive = 0.25, .correlation = 0.9}, 3);
  EXPECT_EQ(std::count_if(a.w.begin(), a.w.end(), [](float w) { return w > 0; }), 3 * 5);
  EXPECT_EQ(a.ke, (std::vector<std::int32_t>{498, 499, 500}));
  EXPECT_TRUE(std::none_of(a.k.begin(), a.k.end(), is_nan_e4m3));
  EXPECT_EQ(random_activations(3, 500, 20, 32, {}, 3).k, random_activations(3, 500, 20, 32, {}, 3).k);
  EXPECT_NE(random_activations(3, 500, 20, 32, {}, 3).k, random_activations(3, 500, 20, 32, {}, 4).k);
}

TEST(Synth, ExtensionAddsNeighboursBeforeTheKeys) {
  const Activations a = random_activations(2, 50, 4, 32, {}, 1);
  const Activations exact = extended(a.problem(), 80, 0.0, 1);
  EXPECT_EQ(exact.ke, (std::vector<std::int32_t>{79, 80}));
  EXPECT_TRUE(std::equal(a.k.begin(), a.k.end(), exact.k.begin() + 30 * 32));
  // Without jitter every added key is one of the old ones.
  for (std::size_t i = 0; i < 30; ++i) {
    const auto key = exact.k.begin() + static_cast<std::ptrdiff_t>(i) * 32;
    bool found = false;
    for (std::size_t j = 0; j < 50; ++j)
      found = found || std::equal(key, key + 32, a.k.begin() + static_cast<std::ptrdiff_t>(j) * 32);
    EXPECT_TRUE(found) << i;
  }
  EXPECT_NE(extended(a.problem(), 80, 0.1, 1).k, exact.k);
}

}  // namespace
}  // namespace dosa
