// Directed rounding and the total order of scores.
#include "base/numeric.hpp"

#include <vector>

#include <gtest/gtest.h>

namespace dosa {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(Numeric, OrderCodesSortLikeTheSelection) {
  const std::vector<float> best_first = {
      kInf,   3e38F, 1.0F, std::nextafterf(1.0F, 0.0F), 0x1p-126F, 0x1p-149F, 0.0F, -0x1p-149F, -0x1p-126F, -1.0F,
      -3e38F, -kInf, kNaN};
  for (std::size_t i = 1; i < best_first.size(); ++i) {
    EXPECT_LT(order_code(best_first[i - 1]), order_code(best_first[i])) << best_first[i];
  }
  EXPECT_EQ(order_code(-0.0F), order_code(0.0F));
  EXPECT_EQ(order_code(-kNaN), order_code(kNaN));
  EXPECT_EQ(order_code(std::bit_cast<float>(0xFF800001U)), 0xFFFFFFFFU);  // a signalling NaN
}

TEST(Numeric, OrderCodesCanBeReadBack) {
  for (const float x : {kInf, 3e38F, 1.5F, 0x1p-149F, 0.0F, -0x1p-149F, -7.0F, -kInf}) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(score_of_code(order_code(x))), std::bit_cast<std::uint32_t>(x));
  }
  EXPECT_EQ(std::bit_cast<std::uint32_t>(score_of_code(order_code(-0.0F))), 0U);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(score_of_code(order_code(-kNaN))), 0x7FC00000U);
}

TEST(Numeric, RoundingIsDirected) {
  EXPECT_EQ(round_up(1.0), 1.0F);
  EXPECT_EQ(round_up(1.0 + 0x1p-40), std::nextafterf(1.0F, 2.0F));
  EXPECT_EQ(round_up(-1.0 - 0x1p-40), -1.0F);
  EXPECT_EQ(round_down(1.0 + 0x1p-40), 1.0F);
  EXPECT_EQ(round_down(-1.0 - 0x1p-40), std::nextafterf(-1.0F, -2.0F));
  EXPECT_EQ(round_up(0x1p-200), 0x1p-149F);
  EXPECT_EQ(round_up(-0x1p-200), 0.0F);
  EXPECT_EQ(round_down(1e300), std::numeric_limits<float>::max());
  EXPECT_EQ(round_up(1e300), kInf);
}

TEST(Numeric, ReluTurnsNaNAndMinusZeroIntoZero) {
  for (const float x : {-1.0F, -0.0F, 0.0F, kNaN, -kNaN, -kInf}) EXPECT_EQ(std::bit_cast<std::uint32_t>(relu(x)), 0U);
  EXPECT_EQ(relu(kInf), kInf);
  EXPECT_EQ(relu(0x1p-149F), 0x1p-149F);
}

TEST(Numeric, GammaCoversRepeatedRounding) {
  for (const int n : {1, 31, 128}) {
    EXPECT_GE(1.0 + gamma_n(n), std::pow(1.0 + kUnitRoundoff, n));
    EXPECT_GE(gamma_n(n), 1.0 - std::pow(1.0 - kUnitRoundoff, n));
  }
}

}  // namespace
}  // namespace dosa
