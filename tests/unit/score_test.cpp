// E4M3, the tensor-core step, the reference scores, the oracle and quantisation, against values derived by hand.
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "base/dtype.hpp"
#include "base/numeric.hpp"
#include "score/oracle.hpp"
#include "score/quantize.hpp"
#include "score/reference.hpp"
#include "score/sm90.hpp"
#include "support/cases.hpp"

namespace dosa {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

// ---------------------------------------------------------------------------------------------------------------- E4M3

TEST(E4m3, DecodesTheValuesOfTheFormat) {
  EXPECT_EQ(bits(decode_e4m3(0x00)), bits(0.0F));
  EXPECT_EQ(bits(decode_e4m3(0x80)), bits(-0.0F));
  EXPECT_EQ(decode_e4m3(0x01), 0x1p-9F);  // smallest subnormal
  EXPECT_EQ(decode_e4m3(0x07), 7 * 0x1p-9F);
  EXPECT_EQ(decode_e4m3(0x08), 0x1p-6F);  // smallest normal
  EXPECT_EQ(decode_e4m3(0x09), 1.125F * 0x1p-6F);
  EXPECT_EQ(decode_e4m3(0x38), 1.0F);
  EXPECT_EQ(decode_e4m3(0xB9), -1.125F);
  EXPECT_EQ(decode_e4m3(0x77), 240.0F);
  EXPECT_EQ(decode_e4m3(0x78), 256.0F);
  EXPECT_EQ(decode_e4m3(0x7E), 448.0F);
  EXPECT_EQ(decode_e4m3(0xFE), -448.0F);
  EXPECT_TRUE(std::isnan(decode_e4m3(0x7F)));
  EXPECT_TRUE(std::isnan(decode_e4m3(0xFF)));
}

TEST(E4m3, EveryByteSurvivesARoundTrip) {
  for (int byte = 0; byte < 256; ++byte) {
    const auto b = static_cast<std::uint8_t>(byte);
    EXPECT_EQ(encode_e4m3(decode_e4m3(b)), is_nan_e4m3(b) ? kE4m3NaN : b) << byte;
  }
}

TEST(E4m3, EncodesToNearestEven) {
  for (int byte = 0; byte < 0x7E; ++byte) {
    const float below = decode_e4m3(static_cast<std::uint8_t>(byte));
    const float above = decode_e4m3(static_cast<std::uint8_t>(byte + 1));
    const float middle = (below + above) / 2;
    const int even = byte + (byte & 1);
    EXPECT_EQ(encode_e4m3(middle), even) << byte;
    EXPECT_EQ(encode_e4m3(-middle), even | 0x80) << byte;
    EXPECT_EQ(encode_e4m3(std::nextafterf(middle, 0.0F)), byte);
    EXPECT_EQ(encode_e4m3(std::nextafterf(middle, kInf)), byte + 1);
  }
}

TEST(E4m3, SaturatesAndFlushes) {
  for (const float x : {448.0F, 449.0F, 464.0F, 480.0F, 1e30F, std::numeric_limits<float>::max(), kInf}) {
    EXPECT_EQ(encode_e4m3(x), 0x7E);
    EXPECT_EQ(encode_e4m3(-x), 0xFE);
  }
  for (const float x : {0x1p-10F, 0x1p-11F, 1e-30F, 0x1p-126F, 0x1p-149F, 0.0F}) {
    EXPECT_EQ(encode_e4m3(x), 0x00);
    EXPECT_EQ(encode_e4m3(-x), 0x80);
  }
  EXPECT_EQ(encode_e4m3(std::nextafterf(0x1p-10F, 1.0F)), 0x01);
  EXPECT_EQ(encode_e4m3(kNaN), 0x7F);
  EXPECT_EQ(encode_e4m3(-kNaN), 0x7F);
}

// ------------------------------------------------------------------------------------------------------------ sm90
// step

constexpr std::uint8_t kOne = 0x38, kMinusOne = 0xB8, kTwo = 0x40, kMax = 0x7E;
constexpr std::uint8_t k2m6 = 0x08, k2m7 = 0x04, k2m8 = 0x02, k2m9 = 0x01;  // 2^-6 .. 2^-9

struct Product {
  std::uint8_t a, b;
};

float step(std::initializer_list<Product> products, float c = 0.0F) {
  std::array<Sm90Operand, kSm90Step> a, b;
  a.fill(sm90_operand(0x00));
  b.fill(sm90_operand(0x00));
  std::size_t i = 0;
  for (const Product p : products) {
    a[i] = sm90_operand(p.a);
    b[i++] = sm90_operand(p.b);
  }
  return sm90_step(a, b, c);
}

TEST(Sm90Step, SmallSumsAreExact) {
  EXPECT_EQ(step({{kOne, kOne}}), 1.0F);
  EXPECT_EQ(step({{kOne, kOne}, {kTwo, kMinusOne}}), -1.0F);
  EXPECT_EQ(step({{k2m9, k2m9}}), 0x1p-18F);
  EXPECT_EQ(step({{kMax, kMax}}), 200704.0F);
  EXPECT_EQ(step({{kOne, kOne}}, 2.5F), 3.5F);
}

TEST(Sm90Step, AddendsAreTruncatedBelowTheLargestExponentMinus13) {
  EXPECT_EQ(step({{kOne, kOne}, {k2m6, k2m7}}), 1.0F + 0x1p-13F);
  EXPECT_EQ(step({{kOne, kOne}, {k2m6, k2m8}}), 1.0F);
  EXPECT_EQ(step({{kOne, kOne}, {k2m6, k2m8}, {k2m6, k2m8}, {k2m6, k2m8}, {k2m6, k2m8}}), 1.0F);
  // Toward zero, not down: -2^-14 vanishes too.
  EXPECT_EQ(step({{kOne, kOne}, {k2m6, k2m8 | 0x80}}), 1.0F);
  EXPECT_EQ(step({{kOne, kMinusOne}, {k2m6, k2m8}}), -1.0F);
}

TEST(Sm90Step, ExponentsOfProductsAreNotRenormalised) {
  // 1.875^2 = 3.515625 counts as exponent 0, so that the unit is 2^-13: two addends of 2^-13 still matter.
  EXPECT_EQ(step({{0x3F, 0x3F}, {k2m6, k2m7}, {k2m6, k2m7}}), 3.515625F + 0x1p-12F);
  // 2^-9 * 256 = 0.5, but a subnormal counts as exponent -6: e = 2, unit 2^-11, and 2^-12 is lost.
  EXPECT_EQ(step({{k2m9, 0x78}, {k2m6, k2m6}}), 0.5F);
}

TEST(Sm90Step, TheResultKeeps13FractionBits) {
  EXPECT_EQ(step({{kOne, kOne}, {kOne, kOne}, {k2m6, k2m7}}), 2.0F);  // 2 + 2^-13 needs 14
  EXPECT_EQ(step({{kOne, kMinusOne}, {kOne, kMinusOne}, {k2m6, k2m7 | 0x80}}), -2.0F);
  EXPECT_EQ(step({{0x3F, 0x3F}, {k2m6, k2m7}}), 3.515625F);
}

TEST(Sm90Step, TheAccumulatorIsAnAddendLikeAnyOther) {
  EXPECT_EQ(step({{kTwo, kOne}}, 1.0F + 0x1p-13F), 3.0F);   // unit 2^-12
  EXPECT_EQ(step({{kTwo, kOne}}, -1.0F - 0x1p-13F), 1.0F);  // truncated toward zero
  EXPECT_EQ(step({{k2m6, k2m6}}, 4.0F), 4.0F);              // its exponent counts: unit 2^-11
  EXPECT_EQ(step({}, 1.0F + 0x1p-13F), 1.0F + 0x1p-13F);
  EXPECT_EQ(step({}, -0x1.8p-18F), -0x1.8p-18F);
}

TEST(Sm90Step, ZeroIsPositiveAndNaNSpreads) {
  EXPECT_EQ(bits(step({})), bits(0.0F));
  EXPECT_EQ(bits(step({{0x80, kOne}, {kMinusOne, 0x00}})), bits(0.0F));
  EXPECT_EQ(bits(step({{kOne, kOne}}, -1.0F)), bits(0.0F));
  EXPECT_TRUE(std::isnan(step({{0x7F, kOne}})));
  EXPECT_TRUE(std::isnan(step({{kOne, 0xFF}}, 3.0F)));
  EXPECT_TRUE(std::isnan(step({{0x7F, 0x00}})));
  EXPECT_TRUE(std::isnan(step({{kOne, kOne}}, kNaN)));
  EXPECT_EQ(step({{kOne, kOne}}, -kInf), -kInf);
}

// Random operands: the error of four steps stays inside its derived bound,
// 2^-13 (131 max(P, max |D_t|) + 4 T), P = max 2^(E(a) + E(b)), T = sum |p_i|.
TEST(Sm90Step, FourStepsStayInsideTheDerivedErrorBound) {
  test::Random random(1);
  for (int trial = 0; trial < 20000; ++trial) {
    Bytes a(128), b(128);
    std::array<Sm90Operand, 128> sa, sb;
    double largest = 0, total = 0;
    const auto draw = [&](int narrow) {  // narrow trials keep exponents close, where most bits are lost
      const auto byte = static_cast<std::uint8_t>(random());
      return static_cast<std::uint8_t>(is_nan_e4m3(byte) ? 0 : narrow ? (byte & 0x87) | 0x38 : byte);
    };
    for (std::size_t d = 0; d < 128; ++d) {
      a[d] = draw(trial & 1);
      b[d] = draw(trial & 2);
      sa[d] = sm90_operand(a[d]);
      sb[d] = sm90_operand(b[d]);
      const double p = std::fabs(static_cast<double>(kE4m3Table[a[d]]) * kE4m3Table[b[d]]);
      total += p;
      if (p > 0) largest = std::max(largest, std::ldexp(1.0, sa[d].exponent + sb[d].exponent));
    }
    float x = 0;
    for (std::size_t d = 0; d < 128; d += 32) {
      x = sm90_step(std::span(sa).subspan(d).first<32>(), std::span(sb).subspan(d).first<32>(), x);
      largest = std::max(largest, static_cast<double>(std::fabs(x)));
    }
    const double exact = static_cast<double>(exact_dot(a.data(), b.data(), 128)) * 0x1p-18;
    ASSERT_LE(std::fabs(x - exact), 0x1p-13 * (131 * largest + 4 * total)) << trial;
  }
}

// ------------------------------------------------------------------------------------------------------ reference
// scores

/// One-hot heads: each has dot 1 with a key of all ones.
struct Heads {
  Bytes q;
  std::vector<float> w;
};

Heads heads_of(std::vector<float> w) {
  Heads heads{Bytes(w.size() * 32, 0), w};
  for (std::size_t h = 0; h < w.size(); ++h) heads.q[h * 32 + h % 32] = kOne;
  return heads;
}

float score(ReferenceScorer scorer, const Heads& heads, float k_scale = 1.0F, std::uint8_t k = kOne) {
  return reference_score(scorer, heads.q, heads.w, Bytes(32, k), k_scale);
}

constexpr auto kCpu = ReferenceScorer::cpu;
constexpr auto kSm90 = ReferenceScorer::sm90;

TEST(Reference, CpuSumsHeadsInOneChain) {
  EXPECT_EQ(score(kCpu, heads_of({0x1p24F, 1, 1})), 0x1p24F);  // ties to even, twice
  EXPECT_EQ(score(kCpu, heads_of({1, 1, 0x1p24F})), 0x1p24F + 2);
  EXPECT_EQ(score(kCpu, heads_of({0x1p24F, -0x1p24F, 1})), 1.0F);
  // One multiplication by the scale at the end.
  EXPECT_EQ(score(kCpu, heads_of({2, -2}), std::numeric_limits<float>::max()), 0.0F);
  EXPECT_EQ(score(kCpu, heads_of({3}), 0x1p-149F), 3 * 0x1p-149F);
}

TEST(Reference, CpuFusesTheHeadSum) {
  // Head 0 gives 1; head 1 gives w * x with x = 1 + 2^-3 and w = 1 + 2^-23, whose product needs 27 bits.
  Heads heads = heads_of({-1.125F, 1 + 0x1p-23F});
  heads.q[32 + 1] = 0x39;
  EXPECT_EQ(score(kCpu, heads), 1.125F * 0x1p-23F);
}

TEST(Reference, CpuDotIsAnFmaChainOverComponents) {
  test::Random random(2);
  for (int trial = 0; trial < 2000; ++trial) {
    const std::size_t dim = std::array<std::size_t, 3>{32, 64, 128}[random() % 3];
    const std::size_t heads = 1 + random() % 20;
    Bytes q(heads * dim), k(dim);
    std::vector<float> w(heads);
    for (auto& byte : q) byte = static_cast<std::uint8_t>(random() % 200 == 0 ? 0x7F : random());
    for (auto& byte : k) byte = static_cast<std::uint8_t>(random() % 2000 == 0 ? 0xFF : random() % 0xFF);
    for (auto& weight : w) weight = std::bit_cast<float>(static_cast<std::uint32_t>(random()) % 0x50000000U) - 1.0F;
    float sum = 0.0F;
    for (std::size_t h = 0; h < heads; ++h) {
      float x = 0.0F;
      for (std::size_t d = 0; d < dim; ++d) x = std::fma(decode_e4m3(q[h * dim + d]), decode_e4m3(k[d]), x);
      sum = std::fma(w[h], x > 0 ? x : 0.0F, sum);
    }
    ASSERT_EQ(bits(reference_score(kCpu, q, w, k, 0.3F)), bits(0.3F * sum)) << trial;
  }
}

TEST(Reference, Sm90SumsEightChainsInPairsOfLanes) {
  std::vector<float> w(16, 0.0F);
  // Lane 0: even chain 2^24 + 1 -> 2^24, odd chain -2^24 + 1.
  w[0] = 0x1p24F;
  w[8] = 1;
  w[1] = -0x1p24F;
  w[9] = 1;
  EXPECT_EQ(score(kSm90, heads_of(w)), 1.0F);
  EXPECT_EQ(score(kCpu, heads_of(w)), 2.0F);
  // (p0 + p1) + (p2 + p3): 2^24 + 1 -> 2^24, 1 + 1 = 2.
  EXPECT_EQ(score(kSm90, heads_of({0x1p24F, 0, 1, 0, 1, 0, 1, 0})), 0x1p24F + 2);
  EXPECT_EQ(score(kSm90, heads_of({0x1p24F, 0, 1, 0, 1})), 0x1p24F);
  // The scale multiplies each lane.
  EXPECT_TRUE(std::isnan(score(kSm90, heads_of({2, 0, -2}), std::numeric_limits<float>::max())));
  EXPECT_EQ(score(kSm90, heads_of({2, -2}), std::numeric_limits<float>::max()), 0.0F);
}

TEST(Reference, Sm90PadsToEightHeadsOfWeightZero) {
  test::Random random(3);
  for (const std::size_t heads : {1U, 3U, 8U, 13U, 24U}) {
    Bytes q(heads * 128), k(128);
    std::vector<float> w(heads);
    for (auto& byte : q) byte = static_cast<std::uint8_t>(random() % 0x7F);
    for (auto& byte : k) byte = static_cast<std::uint8_t>(random() % 0x7F);
    for (auto& weight : w) weight = static_cast<float>(random() % 1000) - 500.0F;
    const float unpadded = reference_score(kSm90, q, w, k, 0.3F);
    w.resize((heads + 7) / 8 * 8, 0.0F);
    q.resize(w.size() * 128, 0x7F);  // NaN dots count as 0
    EXPECT_EQ(bits(reference_score(kSm90, q, w, k, 0.3F)), bits(unpadded)) << heads;
  }
}

TEST(Reference, SignOfZero) {
  const std::vector<float> negative(8, -1.0F);
  EXPECT_EQ(bits(score(kSm90, heads_of(negative), 1.0F, 0x00)), bits(-0.0F));
  EXPECT_EQ(bits(score(kSm90, heads_of({-1.0F}), 1.0F, 0x00)), bits(0.0F));  // padding adds +0
  EXPECT_EQ(bits(score(kCpu, heads_of(negative), 1.0F, 0x00)), bits(0.0F));  // the chain starts from +0
  EXPECT_EQ(bits(score(kCpu, heads_of(negative), 0.0F)), bits(-0.0F));
  EXPECT_EQ(bits(score(kCpu, heads_of(negative), 0x1p-149F)), bits(-8 * 0x1p-149F));
  EXPECT_EQ(bits(score(kCpu, heads_of({-0x1p-2F}), 0x1p-149F)), bits(-0.0F));  // underflow
}

TEST(Reference, NonFiniteData) {
  for (const ReferenceScorer scorer : {kCpu, kSm90}) {
    EXPECT_EQ(bits(score(scorer, heads_of({5}), 1.0F, 0x7F)), bits(0.0F));  // a NaN dot is 0
    EXPECT_EQ(bits(score(scorer, heads_of({5}), 1.0F, 0xFF)), bits(0.0F));
    EXPECT_TRUE(std::isnan(score(scorer, heads_of({kInf}), 1.0F, 0x00)));  // inf * 0
    EXPECT_TRUE(std::isnan(score(scorer, heads_of({kNaN}), 1.0F, 0x00)));
    EXPECT_TRUE(std::isnan(score(scorer, heads_of({kNaN}), 1.0F, 0x7F)));
    EXPECT_TRUE(std::isnan(score(scorer, heads_of({1, kInf, -kInf}))));
    EXPECT_EQ(score(scorer, heads_of({-kInf})), -kInf);
    EXPECT_TRUE(std::isnan(score(scorer, heads_of({1}), kNaN)));
    EXPECT_EQ(score(scorer, heads_of({1, 1, 1, 1, 1, 1, 1, 1}), kInf), kInf);
    EXPECT_TRUE(std::isnan(score(scorer, heads_of({1}), kInf, 0x00)));  // 0 * inf
    EXPECT_EQ(score(scorer, heads_of({1}), -2.0F), -2.0F);
  }
  // An infinite scale meets each lane's sum by itself.
  EXPECT_EQ(score(kCpu, heads_of({1}), kInf), kInf);
  EXPECT_TRUE(std::isnan(score(kSm90, heads_of({1}), kInf)));
  // One NaN component spoils one head only.
  Heads heads = heads_of({1, 2});
  heads.q[0] = 0x7F;
  EXPECT_EQ(score(kCpu, heads), 2.0F);
  EXPECT_EQ(score(kSm90, heads), 2.0F);
}

TEST(Reference, LargestFiniteScoreOfTheFormat) {  // known failure D12
  const Bytes q(64 * 128, kMax), k(128, kMax);
  const std::vector<float> w(64, 1.0F);
  const float expected = 64.0F * 128 * 448 * 448 * 448;
  EXPECT_EQ(reference_score(kCpu, q, w, k, 448.0F), expected);
  EXPECT_EQ(reference_score(kSm90, q, w, k, 448.0F), expected);
}

TEST(Reference, CpuDotStaysInsideItsErrorBound) {
  test::Random random(4);
  for (int trial = 0; trial < 2000; ++trial) {
    Bytes q(128), k(128);
    double total = 0;
    for (std::size_t d = 0; d < 128; ++d) {
      q[d] = static_cast<std::uint8_t>((random() % 0x7F) | (random() % 2) << 7);
      k[d] = static_cast<std::uint8_t>((random() % 0x7F) | (random() % 2) << 7);
      total += std::fabs(static_cast<double>(kE4m3Table[q[d]]) * kE4m3Table[k[d]]);
    }
    const double exact = static_cast<double>(exact_dot(q.data(), k.data(), 128)) * 0x1p-18;
    const float x = reference_score(kCpu, q, std::vector<float>{1.0F}, k, 1.0F);
    EXPECT_LE(std::fabs(x - std::max(exact, 0.0)), gamma_n(127) * total);
  }
}

TEST(ExactDot, CountsUnitsOfTwoToTheMinus18) {
  EXPECT_EQ(exact_dot(Bytes{k2m9}.data(), Bytes{k2m9 | 0x80}.data(), 1), -1);
  EXPECT_EQ(exact_dot(Bytes(128, kMax).data(), Bytes(128, kMax).data(), 128), std::int64_t{128} * 448 * 448 << 18);
}

// ---------------------------------------------------------------------------------------------------------------
// oracle

TEST(Oracle, SortsByScoreThenId) {
  const test::Case c = test::explicit_scores({1, 3, 3, -kInf, kNaN, kInf, -0.0F, 0, kNaN, 3}, 10);
  const OracleRow row = oracle_row(c.problem(), 0, kCpu, Order::score, IndexSpace::absolute);
  EXPECT_EQ(row.ids, (std::vector<std::int32_t>{5, 1, 2, 9, 0, 6, 7, 3, 4, 8}));
  EXPECT_EQ(row.scores[0], kInf);
  EXPECT_EQ(bits(row.scores[5]), bits(-0.0F));
  EXPECT_EQ(bits(row.scores[6]), bits(0.0F));
  EXPECT_EQ(row.scores[7], -kInf);
  EXPECT_EQ(bits(row.scores[8]), 0x7FC00000U);
}

TEST(Oracle, ArrangesWinners) {
  test::Case c = test::explicit_scores({9, 1, 3, 2, 5, 4, 9}, 3, 2);
  c.ks = {1, -4};
  c.ke = {6, 2};
  const auto row = [&](std::int64_t j, Order order, IndexSpace space) {
    return oracle_row(c.problem(), j, kCpu, order, space);
  };
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(row(0, Order::score, IndexSpace::absolute).ids, (Ids{4, 5, 2}));
  EXPECT_EQ(row(0, Order::score, IndexSpace::relative).ids, (Ids{3, 4, 1}));
  EXPECT_EQ(row(0, Order::ascending, IndexSpace::absolute).ids, (Ids{2, 4, 5}));
  EXPECT_EQ(row(0, Order::ascending, IndexSpace::relative).ids, (Ids{1, 3, 4}));
  EXPECT_EQ(row(0, Order::ascending, IndexSpace::relative).scores, (std::vector<float>{3, 5, 4}));
  EXPECT_EQ(row(1, Order::score, IndexSpace::relative).ids, (Ids{0, 1, -1}));
  EXPECT_EQ(row(1, Order::score, IndexSpace::relative).scores, (std::vector<float>{9, 1, -kInf}));
}

TEST(Oracle, ReadsAnyStrides) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    test::Case c = test::random_case(seed, 3, 40, 5, 32, 7);
    test::make_ragged(c, seed);
    const test::StridedCase strided(c, seed);
    for (std::int64_t j = 0; j < 3; ++j) {
      const OracleRow a = oracle_row(c.problem(), j, kCpu, Order::score, IndexSpace::absolute);
      const OracleRow b = oracle_row(strided.problem(), j, kCpu, Order::score, IndexSpace::absolute);
      EXPECT_EQ(a.ids, b.ids);
      EXPECT_EQ(a.scores, b.scores);
    }
  }
}

// -------------------------------------------------------------------------------------------------------------
// quantise

TEST(Quantize, ScaleIsAmaxOver448) {
  Bytes out(4);
  EXPECT_EQ(quantize_row(std::vector<float>{1, -2, 0, 0.5F}, out, ScaleRule::amax), 2.0F / 448);
  EXPECT_EQ(out, (Bytes{0x76, 0xFE, 0x00, 0x6E}));  // 224, -448, 0, 112
  EXPECT_EQ(quantize_row(std::vector<float>{448, 18, 17, 19}, out, ScaleRule::amax), 1.0F);
  EXPECT_EQ(out, (Bytes{0x7E, 0x59, 0x58, 0x5A}));  // 448, 18, 17 -> 16, 19 -> 20: ties to even
}

TEST(Quantize, PowerOfTwoScalesAreRoundedUp) {
  Bytes out(2);
  EXPECT_EQ(quantize_row(std::vector<float>{448, 1}, out, ScaleRule::power_of_two), 1.0F);
  EXPECT_EQ(quantize_row(std::vector<float>{449, 1}, out, ScaleRule::power_of_two), 2.0F);
  EXPECT_EQ(out, (Bytes{0x76, 0x30}));  // 224.5 -> 224, 0.5
  EXPECT_EQ(quantize_row(std::vector<float>{447, 1}, out, ScaleRule::power_of_two), 1.0F);
  EXPECT_EQ(quantize_row(std::vector<float>{1e-40F, 0}, out, ScaleRule::power_of_two, 0.0F), 0x1p-126F);
}

TEST(Quantize, ZeroRowsHaveTheFloorsScale) {  // known failure B8
  Bytes out(3, 0xAA);
  EXPECT_EQ(quantize_row(std::vector<float>{0, 0, -0.0F}, out, ScaleRule::amax), 1e-4F / 448);
  EXPECT_EQ(out, (Bytes{0x00, 0x00, 0x80}));
  EXPECT_EQ(quantize_row(std::vector<float>{0, 0, -0.0F}, out, ScaleRule::amax, 0.0F), 0.0F);
  EXPECT_EQ(out, (Bytes{0x00, 0x00, 0x00}));
  EXPECT_EQ(quantize_row(std::vector<float>{0, kNaN, 0}, out, ScaleRule::power_of_two, 0.0F), 0.0F);
  EXPECT_EQ(out, (Bytes{0x00, 0x7F, 0x00}));
}

TEST(Quantize, NonFiniteComponentsDoNotSpoilTheOthers) {
  Bytes out(4);
  EXPECT_EQ(quantize_row(std::vector<float>{kNaN, kInf, -kInf, 448}, out, ScaleRule::amax), 1.0F);
  EXPECT_EQ(out, (Bytes{0x7F, 0x7E, 0xFE, 0x7E}));
}

TEST(Quantize, TheLargestComponentNeverExceedsTheFormat) {
  test::Random random(5);
  for (int trial = 0; trial < 100000; ++trial) {
    const float amax = std::bit_cast<float>(static_cast<std::uint32_t>(random() % 0x7F800000U));
    Bytes out(1);
    const float scale =
        quantize_row(std::vector<float>{amax}, out, trial % 2 ? ScaleRule::amax : ScaleRule::power_of_two);
    ASSERT_TRUE(std::isfinite(scale) && scale > 0);
    ASSERT_TRUE(amax < 1e-4F || trial % 2 == 0 || out[0] == 0x7E) << amax;
    ASSERT_LE(out[0], 0x7E);
  }
}

TEST(Quantize, Bf16RowsLikeF32Rows) {
  test::Random random(6);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<std::uint16_t> half(128);
    std::vector<float> full;
    for (auto& x : half) {
      x = static_cast<std::uint16_t>(random());
      full.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16));
    }
    Bytes a(128), b(128);
    EXPECT_EQ(quantize_row_bf16(half, a, ScaleRule::amax), quantize_row(full, b, ScaleRule::amax));
    EXPECT_EQ(a, b);
  }
}

}  // namespace
}  // namespace dosa
