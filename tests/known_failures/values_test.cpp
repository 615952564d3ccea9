// B: NaN, infinities, signed zero, extreme magnitude. J, K: heads, K, head sums.
#include <algorithm>
#include <chrono>

#include "known_failures/support.hpp"

namespace dosa::test {
namespace {

TEST(KnownFailures, B1_RowsFullOfNaN) {
  for (const int percent : {50, 83, 100}) {
    Random random(1);
    const auto score = [&](int) {
      return static_cast<int>(random() % 100) < percent ? kNaN : uniform(random, -1.0F, 1.0F);
    };
    expect_exact_scores(scores_of(1243, score), 512, 40);
  }
  expect_exact_scores(scores_of(1300, [](int i) { return i % 13 < 10 ? kNaN : static_cast<float>(i); }), 512);
}

TEST(KnownFailures, B2_InfiniteScoresComeFirst) {
  Random random(2);
  Case c = explicit_scores(
      scores_of(32768, [&](int i) { return i == 5 || i == 20001 || i == 32767 ? kInf : uniform(random, -1.0F, 1.0F); }),
      1024, 4);
  expect_exact(c.problem(), many_ways());
  for (const Options& options : fast_ways()) {
    for (const OracleRow& row : select(c.problem(), options)) {
      EXPECT_EQ(Ids(row.ids.begin(), row.ids.begin() + 3), (Ids{5, 20001, 32767}));
    }
  }
}

TEST(KnownFailures, B3_ZerosOfBothSignsAreOneTie) {
  // Key scale 0 with a negative head gives -0.0; the score keeps its sign.
  expect_exact_scores(
      scores_of(3000, [](int i) { return i % 30 == 0  ? 1.0F + static_cast<float>(i)
                                         : i % 2 == 0 ? -0.0F
                                                      : 0.0F; }),
      2048);
  // Underflow of a negative score gives -0.0 too.
  Case c = explicit_scores(
      scores_of(3000, [](int i) { return i % 2 == 0   ? -0x1p-149F
                                         : i % 3 == 0 ? 0.0F
                                                      : 0x1p-149F; }), 2048);
  c.w = {0.25F, -0.25F};
  expect_exact(c.problem(), many_ways());
  // All heads negative and every dot zero.
  Case negative = random_case(3, 2, 3000, 8, 32, 100, {.positive = 0});
  std::fill(negative.k.begin(), negative.k.end(), std::uint8_t{0x80});
  expect_exact(negative.problem(), many_ways());
}

TEST(KnownFailures, B4_OneNaNInShortAndLongRows) {
  Case c = explicit_scores(scores_of(100, [](int i) { return i == 3 ? kNaN : static_cast<float>(i); }), 50, 3);
  c.ke = {20, 51, 100};
  expect_exact(c.problem(), many_ways());
  const OracleRow row = select(c.problem(), {})[0];
  EXPECT_EQ(row.ids[19], 3);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(row.scores[19]), 0x7FC00000U);
}

TEST(KnownFailures, B5_EveryScoreNaN) {
  expect_exact_scores(Scores(4096, kNaN), 1000, 2);
  const OracleRow row = select(explicit_scores(Scores(4096, kNaN), 1000).problem(), {})[0];
  EXPECT_EQ(row.ids.front(), 0);
  EXPECT_EQ(row.ids.back(), 999);
}

TEST(KnownFailures, B6_ManyForcedKeys) {
  Random random(6);
  const auto score = [&](int i) { return i < 64 || i >= 5064 ? kInf : uniform(random, 0.0F, 9.0F); };
  expect_exact_scores(scores_of(5128, score), 2048);
  expect_exact_scores(scores_of(5128, [](int i) { return i % 2 == 0 ? kInf : 1.0F; }), 2048);  // more than K
}

TEST(KnownFailures, B7_NonFiniteBytesWeightsAndScales) {
  for (const int row_budget : {0, 1, 4}) {
    Case c = random_case(7, 6, 3000, 8, 64, 200);
    c.k[100 * 64 + 5] = 0x7F;
    c.k[2999 * 64] = 0xFF;
    c.k_scale[50] = kNaN;
    c.k_scale[51] = kInf;
    c.k_scale[52] = -kInf;
    c.k_scale[53] = -1.0F;
    c.q[(1 * 8 + 2) * 64 + 3] = 0x7F;
    c.w[2 * 8 + 0] = kInf;
    c.w[3 * 8 + 1] = kNaN;
    c.w[4 * 8 + 7] = -kInf;
    std::vector<Options> ways = many_ways();
    for (Options& options : ways) options.certificate.row_budget = row_budget;
    expect_exact(c.problem(), ways);
  }
  // Infinite weight times a dot of zero is NaN, for every key alike.
  Case c = explicit_scores(scores_of(100, [](int i) { return static_cast<float>(i); }), 10, 2);
  c.w[0] = kInf;
  expect_exact(c.problem(), many_ways());
}

TEST(KnownFailures, B8_ZeroKeysAndTinyScales) {
  Case c = random_case(8, 3, 2500, 8, 128, 600);
  for (std::int64_t i = 0; i < c.nk; i += 3) {
    std::fill_n(c.k.begin() + i * c.dim, c.dim, std::uint8_t{0});
    c.k_scale[static_cast<std::size_t>(i)] = i % 2 == 0 ? 0.0F : 1.0F;
  }
  for (std::size_t i = 1; i < c.k_scale.size(); i += 3) c.k_scale[i] = i % 2 == 0 ? 1e-38F : 1e-45F;
  expect_exact(c.problem(), many_ways());
  // Nothing but zero keys.
  std::fill(c.k.begin(), c.k.end(), std::uint8_t{0});
  std::fill(c.k_scale.begin(), c.k_scale.end(), 0.0F);
  expect_exact(c.problem(), many_ways());
  EXPECT_EQ(std::bit_cast<std::uint32_t>(select(c.problem(), {})[0].scores[599]), 0U);
}

// Ours: overflow, underflow, and every scale between.
TEST(KnownFailures, B_ExtremeMagnitudes) {
  for (const float magnitude : {1e-44F, 1e-30F, 1e30F, 3e38F}) {
    Case c = random_case(9, 3, 2000, 8, 64, 150);
    Random random(9);
    for (float& scale : c.k_scale) scale = uniform(random, 0.0F, magnitude);
    expect_exact(c.problem(), many_ways());
    for (float& weight : c.w) weight *= 1e30F;
    expect_exact(c.problem(), many_ways());
  }
}

TEST(KnownFailures, D12_LargestFiniteScores) {
  Case c = random_case(12, 2, 600, 64, 128, 100);
  std::fill(c.q.begin(), c.q.end(), std::uint8_t{0x7E});
  std::fill(c.w.begin(), c.w.end(), 1.0F);
  for (std::int64_t i = 0; i < c.nk; i += 2) {
    std::fill_n(c.k.begin() + i * c.dim, c.dim, std::uint8_t{0x7E});
    c.k_scale[static_cast<std::size_t>(i)] = 448.0F;
  }
  expect_exact(c.problem(), many_ways());
  EXPECT_EQ(select(c.problem(), {})[0].scores[0], 64.0F * 128 * 448 * 448 * 448);
}

TEST(KnownFailures, J1_HeadsOf32And64) {
  for (const int heads : {32, 64}) expect_exact(random_case(1, 3, 1500, heads, 128, 100).problem(), many_ways());
}

TEST(KnownFailures, J2_PaddedHeads) {
  for (const int heads : {8, 16, 24}) {
    const Case c = random_case(2, 3, 1000, heads, 128, 100);
    expect_exact(c.problem(), many_ways());
    Case padded = c;
    padded.heads = 32;
    padded.q.assign(static_cast<std::size_t>(c.nq * 32 * c.dim), 0x7F);
    padded.w.assign(static_cast<std::size_t>(c.nq * 32), 0.0F);
    for (std::int64_t j = 0; j < c.nq; ++j) {
      std::copy_n(c.q.begin() + j * heads * c.dim, heads * c.dim, padded.q.begin() + j * 32 * c.dim);
      std::copy_n(c.w.begin() + j * heads, heads, padded.w.begin() + j * 32);
    }
    // The oracle of the unpadded problem.
    const auto expected = expected_rows(c.problem());
    for (const Options& options : many_ways()) EXPECT_TRUE(exact(padded.problem(), expected, options));
  }
}

TEST(KnownFailures, J3_SmallerKIsNotSlower) {
  const auto seconds = [](const Case& c, Method method) {
    Options options;
    options.method = method;
    options.threads = 1;
    double best = 1e9;
    for (int n = 0; n < 3; ++n) {
      const auto begin = std::chrono::steady_clock::now();
      select(c.problem(), options);
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return best;
  };
  Case c = random_case(3, 4, 40000, 8, 128, 2048);
  for (const Method method : {Method::dense, Method::fused, Method::dosa}) {
    c.topk = 2048;
    const double full = seconds(c, method);
    for (const int topk : {512, 1024}) {
      c.topk = topk;
      EXPECT_LT(seconds(c, method), 2 * full + 0.02) << topk;  // a dispatch cliff, not noise
    }
  }
}

TEST(KnownFailures, J4_ScoresOneHundredThousandthApartAtRankK) {
  const std::vector<int> rank = shuffled(5000, 4);
  expect_exact_scores(
      scores_of(5000,
                [&](int i) { return std::pow(1 + 1e-5F, static_cast<float>(-rank[static_cast<std::size_t>(i)])); }),
      2048);
}

TEST(KnownFailures, K3_NegativeDotsContributeNothing) {
  Case c = explicit_scores({1.0F, 1.0F}, 2);
  c.w = {1.0F, 1.0F};
  c.q[32] = 0xC2;  // head 1: -2.5 in dimension 0, where key 0 has 2.0
  c.k[0] = 0x40;
  expect_exact(c.problem(), many_ways());
  EXPECT_EQ(select(c.problem(), {})[0].scores, (Scores{2.0F, 1.0F}));
}

TEST(KnownFailures, K5_FirstRealSelection) {
  for (const int nk : {2048, 2049}) {
    expect_exact_scores(scores_of(nk, [](int i) { return i == 777 ? -5.0F : static_cast<float>(i % 100); }), 2048);
  }
}

}  // namespace
}  // namespace dosa::test
