// What a Hopper screen will need of the certificate: FP8 pairs, and the allowance for the tensor cores' truncating
// sums, against their emulator.
#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/dtype.hpp"
#include "certificate/fp8_pair.hpp"
#include "certificate/hopper_allowance.hpp"
#include "score/oracle.hpp"
#include "score/quantize.hpp"
#include "score/sm90.hpp"

namespace dosa {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Random = std::mt19937_64;

double norm(std::span<const float> v) {
  double square = 0;
  for (const float x : v) square += static_cast<double>(x) * x;
  return std::sqrt(square);
}

std::vector<float> decode(const Bytes& bytes) {
  std::vector<float> out;
  for (const std::uint8_t b : bytes) out.push_back(kE4m3Table[b]);
  return out;
}

float emulated_dot(const Bytes& a, const Bytes& b) { return sm90_dot(a.data(), b.data(), static_cast<int>(a.size())); }

// -------------------------------------------------------------------------------------------------------------- FP8
// pair

TEST(Fp8Pair, RestIsBoundedAndSmall) {
  Random random(1);
  std::normal_distribution<float> normal;
  for (const float scale : {1.0F, 0x1p-80F, 0x1p60F}) {
    for (const std::size_t dim : {32U, 64U, 128U}) {
      std::vector<float> y(dim);
      for (float& v : y) v = scale * normal(random);
      Bytes high(dim), low(dim);
      const Fp8Pair pair = split_fp8(y, high, low);
      double square = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        const double rest = static_cast<double>(y[d]) - static_cast<double>(pair.sigma_high) * kE4m3Table[high[d]] -
                            static_cast<double>(pair.sigma_low) * kE4m3Table[low[d]];
        square += rest * rest;
      }
      EXPECT_LE(std::sqrt(square), pair.rest);
      EXPECT_LE(pair.rest, norm(y) / 300);
      EXPECT_GT(pair.sigma_high, 0.0F);
    }
  }
}

TEST(Fp8Pair, ZeroRowsHaveNoScale) {
  const std::vector<float> zero(64, 0.0F);
  Bytes high(64, 0xAA), low(64, 0xAA);
  Fp8Pair pair = split_fp8(zero, high, low);
  EXPECT_EQ(pair.sigma_high, 0.0F);
  EXPECT_EQ(pair.sigma_low, 0.0F);
  EXPECT_EQ(pair.rest, 0.0F);
  EXPECT_EQ(high, Bytes(64, 0x00));

  std::vector<float> exact(64, 0.0F);  // one component: the high row is exact
  exact[3] = -448.0F * 0x1p-10F;
  pair = split_fp8(exact, high, low);
  EXPECT_EQ(pair.sigma_high, 0x1p-10F);
  EXPECT_EQ(pair.sigma_low, 0.0F);
  EXPECT_EQ(pair.rest, 0.0F);

  std::vector<float> tiny(64, 0x1p-149F);  // no scale can represent it
  pair = split_fp8(tiny, high, low);
  EXPECT_GE(pair.rest + pair.sigma_high, 0x1p-149F);
}

// -------------------------------------------------------------------------------------------------------------
// allowance

enum class Rows { gaussian, bytes, cancelling, tiny_and_huge };

Bytes random_row(Random& random, Rows kind, std::size_t dim) {
  std::normal_distribution<float> normal;
  Bytes out(dim);
  std::vector<float> row(dim);
  for (std::size_t d = 0; d < dim; ++d) {
    switch (kind) {
      case Rows::gaussian: row[d] = normal(random) * 120; break;
      case Rows::bytes:
        do out[d] = static_cast<std::uint8_t>(random());
        while (is_nan_e4m3(out[d]));
        break;
      case Rows::cancelling:  // large products that cancel in pairs, small ones that truncation loses
        row[d] = d % 4 == 0 ? 448.0F : d % 4 == 1 ? -448.0F : 0x1p-4F * static_cast<float>(1 + random() % 15);
        break;
      case Rows::tiny_and_huge:
        row[d] = d % 32 == 0 ? 416.0F : 1.75F * std::ldexp(1.0F, -static_cast<int>(random() % 3));
        break;
    }
    if (kind != Rows::bytes) out[d] = encode_e4m3(row[d]);
  }
  return out;
}

constexpr Rows kRows[] = {Rows::gaussian, Rows::bytes, Rows::cancelling, Rows::tiny_and_huge};

TEST(HopperAllowance, CoversTheEmulatorForOneDot) {
  Random random(2);
  double worst = 0;
  EXPECT_EQ(wgmma_dot_error(128), 135 * 0x1p-13);
  for (const std::size_t dim : {32U, 64U, 128U}) {
    for (int trial = 0; trial < 4000; ++trial) {
      const Bytes q = random_row(random, kRows[random() % 4], dim), k = random_row(random, kRows[random() % 4], dim);
      const double exact = static_cast<double>(exact_dot(q.data(), k.data(), static_cast<int>(dim))) * 0x1p-18;
      const double error = std::abs(emulated_dot(q, k) - exact);
      const double sizes = std::max(norm(decode(q)), 0x1p-6) * std::max(norm(decode(k)), 0x1p-6);
      const double limit = wgmma_dot_error(static_cast<int>(dim)) * sizes;
      EXPECT_LE(error, limit);
      worst = std::max(worst, error / limit);
    }
  }
  EXPECT_GT(worst, 0.01) << "rows that truncate nothing test nothing";
}

TEST(HopperAllowance, JointBoundCoversTheEmulatorAndBeatsTheSum) {
  Random random(3);
  for (int trial = 0; trial < 400; ++trial) {
    const Rows kind = kRows[random() % 4];
    const std::size_t n = 1 + random() % 12;
    std::vector<Bytes> rows;
    std::vector<float> values;
    std::vector<double> multiplier;
    double single = 0;
    for (std::size_t i = 0; i < n; ++i) {
      rows.push_back(random_row(random, kind, 128));
      const std::vector<float> row = decode(rows.back());
      values.insert(values.end(), row.begin(), row.end());
      multiplier.push_back(static_cast<double>(1 + random() % 100) / 100);
      single += multiplier.back() * wgmma_dot_error(128) * std::max(norm(row), 0x1p-6);
    }
    const WgmmaAllowance joint = wgmma_joint_error(values, multiplier, 128);
    for (int key = 0; key < 8; ++key) {
      const Bytes k = key == 0 ? rows[0] : random_row(random, kRows[random() % 4], 128);
      const std::vector<float> decoded = decode(k);
      double error = 0, power = 0x1p-6;
      for (std::size_t i = 0; i < n; ++i) {
        error += multiplier[i] * std::abs(emulated_dot(rows[i], k) -
                                          static_cast<double>(exact_dot(rows[i].data(), k.data(), 128)) * 0x1p-18);
      }
      for (const double v : decoded) {
        if (std::abs(v) >= 0x1p-6) power = std::max(power, std::exp2(std::floor(std::log2(std::abs(v)))));
      }
      EXPECT_LE(error, joint.per_exponent * power + joint.per_norm * std::max(norm(decoded), 0x1p-6));
      EXPECT_LE(power, std::max(norm(decoded), 0x1p-6));
    }
    if (kind == Rows::gaussian && n >= 4) {
      EXPECT_LT(joint.total(), 0.9 * single);
    }
  }
}

}  // namespace
}  // namespace dosa
