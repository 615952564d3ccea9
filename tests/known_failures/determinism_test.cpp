// F: nondeterminism and races.
#include <algorithm>

#include "known_failures/support.hpp"

namespace dosa::test {
namespace {

TEST(KnownFailures, F1_ManyRunsOfOneInput) {
  Case c = random_case(1, 20, 3000, 8, 64, 200);
  make_causal(c);
  for (Options options : fast_ways()) {
    options.threads = 3;
    expect_repeatable(c.problem(), options, 20);
  }
}

TEST(KnownFailures, F2_TiesAtRankK) {
  const std::vector<int> rank = shuffled(10000, 2);
  const Case c = explicit_scores(scores_of(10000,
                                           [&](int i) {
                                             const int r = rank[static_cast<std::size_t>(i)];
                                             return r < 2000 ? 2.0F : r < 2100 ? 1.0F : 0.5F;
                                           }),
                                 2048, 2);
  expect_exact(c.problem(), many_ways());
  for (Options options : fast_ways()) {
    options.threads = 4;
    expect_repeatable(c.problem(), options, 50);
  }
}

TEST(KnownFailures, F3_EveryThreadCountAndImplementation) {
  Random random(3);
  const Case c =
      explicit_scores(scores_of(5000, [&](int) { return std::round(uniform(random, -9.0F, 9.0F)); }), 700, 5);
  const auto expected = expected_rows(c.problem());
  for (const std::string& implementation : cpu_implementations()) {
    for (const int threads : {1, 2, 5, 16}) {
      for (Options options : fast_ways()) {
        options.implementation = implementation;
        options.threads = threads;
        EXPECT_TRUE(exact(c.problem(), expected, options));
      }
    }
  }
}

TEST(KnownFailures, F4_CompanyInTheBatchChangesNothing) {
  const Case alone = random_case(4, 1, 4000, 8, 64, 300);
  const auto expected = expected_rows(alone.problem());
  for (const std::size_t place : {0U, 3U, 8U}) {
    Case batch = random_case(5, 9, 4000, 8, 64, 300);
    batch.k = alone.k;
    batch.k_scale = alone.k_scale;
    std::copy(alone.q.begin(), alone.q.end(), batch.q.begin() + static_cast<std::ptrdiff_t>(place * alone.q.size()));
    std::copy(alone.w.begin(), alone.w.end(), batch.w.begin() + static_cast<std::ptrdiff_t>(place * alone.w.size()));
    for (const Options& options : fast_ways()) {
      EXPECT_EQ(select(batch.problem(), options)[place].ids, expected[0].ids);
    }
  }
}

TEST(KnownFailures, F5_DeterministicByDefault) {
  const Case c = random_case(5, 3, 6000, 8, 128, 500);
  expect_repeatable(c.problem(), Options{}, 5);
  expect_exact(c.problem(), {Options{}});
}

TEST(KnownFailures, F6_PlateauOfZeros) {
  const Case c = explicit_scores(
      scores_of(101500, [](int i) { return i % 67 == 66 && i < 100500 ? static_cast<float>(i) : 0.0F; }), 2048);
  expect_exact(c.problem(), many_ways());
  Ids lowest;
  for (int i = 0; lowest.size() < 548; ++i) {
    if (i % 67 != 66) lowest.push_back(i);
  }
  for (const Options& options : fast_ways()) {
    const Ids ids = select(c.problem(), options)[0].ids;
    EXPECT_EQ(Ids(ids.begin() + 1500, ids.end()), lowest);
  }
}

}  // namespace
}  // namespace dosa::test
