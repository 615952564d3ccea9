// A: crowded buckets, ties, fixed-size candidate buffers, wrong thresholds.
#include <algorithm>

#include "known_failures/support.hpp"

namespace dosa::test {
namespace {

TEST(KnownFailures, A1_MoreScoresNearTheBoundaryThanAnyBufferHolds) {
  Random random(1);
  const auto narrow = [&](int) { return uniform(random, 1.0F, 1.001F); };
  Scores scores = scores_of(8192, [&](int i) { return i % 16 == 3 ? 2.0F : i < 5500 ? narrow(i) : -1.0F; });
  expect_exact_scores(scores, 2048, 2);
  expect_exact(explicit_scores(scores_of(256 * 1024, narrow), 2048, 3).problem(), fast_ways());
}

TEST(KnownFailures, A2_BestScoresArriveLastInsideOneHalfPrecisionUlp) {
  expect_exact_scores(scores_of(6000, [](int i) { return i < 1000   ? 2.0F
                                                         : i < 5139 ? ulps_above(1.0F, i)
                                                                    : 0.0F; }),
                      2048);
}

TEST(KnownFailures, A3_FewWinnersAboveThousandsOfTies) {
  for (const float tie : {1.0F, 0.0F, -3.0F}) {
    expect_exact_scores(scores_of(4096, [&](int i) { return i % 8 == 5 && i < 4000 ? 9.0F : tie; }), 2048);
  }
}

TEST(KnownFailures, A4_ThousandsOfExactZerosFillTheRow) {
  expect_exact_scores(
      scores_of(8320, [](int i) { return i % 83 == 0 && i < 8300 ? 1.0F + static_cast<float>(i) : 0.0F; }), 2048);
  for (const float boundary : {kInf, -kInf}) {
    expect_exact_scores(scores_of(8320, [&](int i) { return i % 83 == 0 ? (boundary > 0 ? kInf : 1.0F) : boundary; }),
                        2048);
    expect_exact_scores(scores_of(8320, [&](int i) { return i % 3 == 0 ? boundary : 1.0F; }), 2048);
  }
}

TEST(KnownFailures, A5_OneMoreThanAPowerOfTwoInOneCoarseBin) {
  Random random(5);
  for (const int nk : {16384, 16385}) {
    const Scores scores = scores_of(nk, [&](int) { return uniform(random, 1.0F, 1.245F); });
    for (const int topk : {512, 1024, 2048}) {
      expect_exact(explicit_scores(scores, topk, nk % 2 == 0 ? 2 : 33).problem(), fast_ways());
    }
  }
}

TEST(KnownFailures, A6_HeavyTails) {
  Random random(6);
  const Scores scores = scores_of(128 * 1024, [&](int) {
    const float small = uniform(random, -1e-3F, 1e-3F);
    return random() % 10 == 0 ? std::exp(uniform(random, -6.0F, 6.0F)) * (random() % 2 == 0 ? 1.0F : -1.0F) : small;
  });
  for (const int topk : {1, 17, 512, 2028, 2048, 4096}) {
    expect_exact(explicit_scores(scores, topk, 2).problem(), fast_ways());
  }
}

TEST(KnownFailures, A7_AllScoresNearlyEqual) {
  Random random(7);
  expect_exact_scores(scores_of(32768, [&](int) { return ulps_above(1.0F, static_cast<int>(random() % 2)); }), 2048);
  expect_exact_scores(scores_of(32768, [&](int) { return -ulps_above(1.0F, static_cast<int>(random() % 2)); }), 2048);
}

TEST(KnownFailures, A8_RanksAroundKDifferByOneUlp) {
  const std::vector<int> rank = shuffled(4096, 8);  // of key i, from 1
  expect_exact_scores(scores_of(4096,
                                [&](int i) {
                                  const int r = rank[static_cast<std::size_t>(i)] + 1;
                                  return r < 2047 ? 2.0F : r > 2050 ? 0.5F : ulps_above(1.0F, 2050 - r);
                                }),
                      2048);
}

TEST(KnownFailures, A9_HalfTiesManyRuns) {
  Random random(9);
  const Case c =
      explicit_scores(scores_of(4096, [&](int i) { return i % 2 == 0 ? 1.0F : uniform(random, 0.0F, 2.0F); }), 1024, 3);
  expect_exact(c.problem());
  for (const Options& options : fast_ways()) expect_repeatable(c.problem(), options, 50);
}

TEST(KnownFailures, A10_LongAndShortRowsMixed) {
  constexpr int k = 300;
  Random random(10);
  Case c = explicit_scores(scores_of(4 * k + 1, [&](int) { return std::floor(uniform(random, 0.0F, 50.0F)); }), k, 7);
  c.ke = {k - 1, 4 * k, 1, k, 4 * k + 1, 0, 4 * k};
  expect_exact(c.problem(), many_ways());
  for (std::size_t row = 0; row < 7; ++row) {
    Case one = explicit_scores(c.k_scale, k, 1);
    one.ke = {c.ke[row]};
    expect_exact(one.problem(), fast_ways());
  }
}

TEST(KnownFailures, A11_AllKeysIdentical) {
  for (const int nk : {4096, 513}) {
    Case c = random_case(11, 4, nk, 8, 64, 512);
    for (std::int64_t i = 1; i < c.nk; ++i) {
      std::copy_n(c.k.begin(), c.dim, c.k.begin() + i * c.dim);
      c.k_scale[static_cast<std::size_t>(i)] = c.k_scale[0];
    }
    expect_exact(c.problem(), many_ways());
    for (std::size_t i = 0; i < c.k_scale.size(); i += 3) c.k_scale[i] = ulps_above(c.k_scale[i], 1);
    expect_exact(c.problem(), many_ways());
  }
}

TEST(KnownFailures, A12_ThresholdOfKeysThatSomeRowsCannotSee) {
  Case c = explicit_scores(scores_of(8192, [](int i) { return i < 4096 ? 10.0F : 1.0F; }), 2048, 6);
  c.ks = {0, 0, 4096, 4096, 0, 4096};
  c.ke = {4096, 8192, 8192, 7000, 4096, 8192};
  for (const int topk : {2048, 4096}) {
    c.topk = topk;
    expect_exact(c.problem(), many_ways());
  }
}

TEST(KnownFailures, A13_UselessHints) {
  Case c = explicit_scores(scores_of(4096, [](int i) { return i % 100 == 7 ? 2.0F : 1.0F; }), 512, 4);
  c.hints.assign(600, 0);
  expect_exact(c.problem(), many_ways());
  Options options;
  options.method = Method::dosa;
  options.seeds = SeedPolicy::chain;
  expect_repeatable(c.problem(), options, 100);
  c.hints.assign({-1, 5000, 2147483647, -2147483647 - 1, 4095, 4095, 7, 7});
  expect_exact(c.problem(), many_ways());
}

TEST(KnownFailures, A14_BestKeysLast) {
  expect_exact(explicit_scores(scores_of(65536, [](int i) { return ulps_above(1.0F, i); }), 2048, 2).problem(),
               many_ways());
  Case c = random_case(14, 3, 8000, 8, 64, 256);
  std::sort(c.k_scale.begin(), c.k_scale.end());
  expect_exact(c.problem(), many_ways());
}

}  // namespace
}  // namespace dosa::test
