// Every kernel of every instruction set against the scalar definitions, bit for bit.
#include "backend/cpu/kernels.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include <gtest/gtest.h>

#include "backend/cpu/keys.hpp"
#include "base/dtype.hpp"
#include "certificate/certificate.hpp"
#include "certificate/integer_screen.hpp"
#include "score/reference.hpp"
#include "support/cases.hpp"

namespace dosa::cpu {
namespace {

constexpr int kMaxDimension = 128;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(std::isnan(x) ? kNaN : x); }

/// 48 keys, some of them odd: every byte occurs.
struct Panel {
  explicit Panel(int dimension, std::uint64_t seed) : dim(dimension), bytes(48 * static_cast<std::size_t>(dimension)) {
    test::Random random(seed);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::uint8_t>(random());
      if (is_nan_e4m3(bytes[i]) && i / static_cast<std::size_t>(dim) % 8 != 5) bytes[i] = 0;  // NaN in few keys
    }
    std::fill_n(bytes.begin() + 7 * dim, dim, std::uint8_t{0});
    std::fill_n(bytes.begin() + 9 * dim, dim, std::uint8_t{0x80});
    std::fill_n(bytes.begin() + 11 * dim, dim, std::uint8_t{0x01});
    for (int key = 0; key < 48; ++key) rows[key] = bytes.data() + key * dim;
  }
  [[nodiscard]] std::span<const std::uint8_t> key(int i) const { return {rows[i], static_cast<std::size_t>(dim)}; }
  [[nodiscard]] std::vector<float> decoded(int i) const {
    std::vector<float> out;
    for (const std::uint8_t byte : key(i)) out.push_back(kE4m3Table[byte]);
    return out;
  }

  int dim;
  std::vector<std::uint8_t> bytes;
  const std::uint8_t* rows[48];
};

/// [rows][dim] to [rows/4][dim][4].
template <typename T>
std::vector<T> in_groups(const std::vector<T>& rows, int count, int dim) {
  std::vector<T> out(static_cast<std::size_t>(round_up_to(count, kRowGroup) * dim), T{});
  for (int r = 0; r < count; ++r) {
    for (int d = 0; d < dim; ++d) {
      out[static_cast<std::size_t>(((r / kRowGroup) * dim + d) * kRowGroup + r % kRowGroup)] =
          rows[static_cast<std::size_t>(r * dim + d)];
    }
  }
  return out;
}

class KernelsTest : public ::testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels = *GetParam();
  alignas(64) float panel[kMaxDimension * 48];
};

TEST_P(KernelsTest, PackPanelDecodesAndTransposes) {
  for (const int dim : {32, 64, 128}) {
    const Panel keys(dim, 1);
    kernels.pack_panel(keys.rows, dim, panel);
    for (int key = 0; key < 48; ++key) {
      for (int d = 0; d < dim; ++d) {
        ASSERT_EQ(bits(panel[d * 48 + key]), bits(kE4m3Table[keys.key(key)[static_cast<std::size_t>(d)]]));
      }
    }
  }
}

TEST_P(KernelsTest, ScorePanelHasTheBitsOfTheReference) {
  test::Random random(2);
  for (const int dim : {32, 64, 128}) {
    for (const int heads : {1, 2, 3, 4, 5, 8, 31, 128}) {
      const Panel keys(dim, random());
      std::vector<std::uint8_t> q(static_cast<std::size_t>(heads * dim));
      for (auto& byte : q) byte = static_cast<std::uint8_t>(random());
      if (heads != 3) std::replace_if(q.begin(), q.end(), is_nan_e4m3, std::uint8_t{1});
      std::vector<float> w, decoded;
      for (int h = 0; h < heads; ++h) w.push_back(std::ldexp(static_cast<float>(random() % 1000) - 500.0F, -9));
      if (heads == 5) w[2] = kInf;
      if (heads == 8) w[7] = kNaN, w[1] = -0.0F;
      for (const std::uint8_t byte : q) decoded.push_back(kE4m3Table[byte]);
      float scale[48];
      for (float& s : scale) s = static_cast<float>(random() % 100) / 7.0F;
      scale[1] = kInf, scale[2] = -kInf, scale[3] = kNaN, scale[4] = -0.0F, scale[5] = 1e-45F, scale[6] = -3.0F;

      kernels.pack_panel(keys.rows, dim, panel);
      const auto packed = in_groups(decoded, heads, dim);
      float scores[48];
      kernels.score_panel(
          {.panel = panel, .q = packed.data(), .w = w.data(), .k_scale = scale, .dim = dim, .heads = heads}, scores);
      const QueryScorer reference(ReferenceScorer::cpu, q, w);
      for (int key = 0; key < 48; ++key) {
        ASSERT_EQ(bits(scores[key]), bits(reference(keys.key(key), scale[key]))) << dim << ' ' << heads << ' ' << key;
      }

      std::vector<float> x(static_cast<std::size_t>(heads * 50), 7.0F);
      kernels.dot_panel(panel, packed.data(), dim, heads, x.data(), 50);
      for (int h = 0; h < heads; ++h) {
        for (int key = 0; key < 48; ++key) {
          float dot = 0;
          const auto k = keys.decoded(key);
          for (int d = 0; d < dim; ++d)
            dot = std::fma(decoded[static_cast<std::size_t>(h * dim + d)], k[static_cast<std::size_t>(d)], dot);
          ASSERT_EQ(bits(x[static_cast<std::size_t>(h * 50 + key)]), bits(dot));
        }
        EXPECT_EQ(x[static_cast<std::size_t>(h * 50 + 48)], 7.0F);  // writes 48 a row
      }
    }
  }
}

TEST_P(KernelsTest, BoundPanelHasTheBitsOfItsDefinition) {
  test::Random random(3);
  std::normal_distribution<float> normal;
  for (const int dim : {32, 64, 128}) {
    for (const int rows : {1, 3, 4, 9, 20, 64}) {
      const Panel keys(dim, random());
      Certificate certificate;
      certificate.rows = rows;
      certificate.linear_rows = static_cast<int>(random() % 2);
      certificate.c = std::fabs(normal(random));
      std::vector<float> row_data;
      for (int n = 0; n < rows * dim; ++n) row_data.push_back(normal(random));
      for (int j = 0; j < rows; ++j) certificate.weight[static_cast<std::size_t>(j)] = normal(random);
      float alpha[48], rho[48];
      for (int key = 0; key < 48; ++key) alpha[key] = std::exp(normal(random)), rho[key] = std::exp(normal(random));
      rho[3] = kInf, rho[4] = 0, alpha[5] = 0, alpha[6] = 1e-45F, alpha[7] = 3e38F;

      kernels.pack_panel(keys.rows, dim, panel);
      const auto packed = in_groups(row_data, rows, dim);
      float bounds[48];
      kernels.bound_panel({.panel = panel,
                           .row_data = packed.data(),
                           .weight = certificate.weight.data(),
                           .alpha = alpha,
                           .rho = rho,
                           .dim = dim,
                           .rows = rows,
                           .linear_rows = certificate.linear_rows,
                           .c = certificate.c},
                          bounds);
      for (int key = 0; key < 48; ++key) {
        const float u = bound_reference(certificate, row_data, keys.decoded(key), rho[key]);
        ASSERT_EQ(bits(bounds[key]), bits(alpha[key] * u)) << dim << ' ' << rows << ' ' << key;
      }
    }
  }
}

TEST_P(KernelsTest, IntegerBoundPanelHasTheBitsOfItsDefinition) {
  if (kernels.bound_panel_i8 == nullptr) GTEST_SKIP() << "no byte dot product in " << kernels.name;
  test::Random random(4);
  std::normal_distribution<float> normal;
  for (const int dim : {32, 64, 128}) {
    for (const int rows : {1, 3, 4, 9, 20, 64}) {
      const Panel keys(dim, random());
      IntegerCertificate certificate;
      certificate.rows = rows;
      certificate.linear_rows = static_cast<int>(random() % 2);
      certificate.c = std::fabs(normal(random));
      certificate.c_e = std::fabs(normal(random));
      std::vector<std::int8_t> row_data;
      for (int n = 0; n < rows * dim; ++n)
        row_data.push_back(static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127));
      for (int j = 0; j < rows; ++j) certificate.weight[static_cast<std::size_t>(j)] = normal(random);
      float alpha[48], rho[48], rho_e[48];
      for (int key = 0; key < 48; ++key) {
        alpha[key] = std::exp(normal(random)), rho[key] = std::exp(normal(random)),
        rho_e[key] = std::exp(normal(random));
      }
      rho[3] = kInf, rho[4] = 0, alpha[5] = 0, rho_e[6] = 0;

      // Words of four bytes take the place of single components.
      const int words = dim / 4;
      std::vector<std::uint32_t> row_words(static_cast<std::size_t>(rows * words));
      std::memcpy(row_words.data(), row_data.data(), row_data.size());
      const auto packed = in_groups(row_words, rows, words);
      std::vector<std::int32_t> offset(static_cast<std::size_t>(round_up_to(rows, kRowGroup)), 0);
      for (int n = 0; n < rows * dim; ++n)
        offset[static_cast<std::size_t>(n / dim)] -= 128 * row_data[static_cast<std::size_t>(n)];

      alignas(64) std::uint32_t integer_panel[kMaxDimension / 4 * 48];
      kernels.pack_panel_i8(keys.rows, dim, integer_panel);
      float bounds[48];
      kernels.bound_panel_i8({.panel = integer_panel,
                              .row_data = packed.data(),
                              .offset = offset.data(),
                              .weight = certificate.weight.data(),
                              .alpha = alpha,
                              .rho = rho,
                              .rho_e = rho_e,
                              .dim = dim,
                              .rows = rows,
                              .linear_rows = certificate.linear_rows,
                              .c = certificate.c,
                              .c_e = certificate.c_e},
                             bounds);
      for (int key = 0; key < 48; ++key) {
        std::vector<std::int8_t> quarters;
        for (const std::uint8_t byte : keys.key(key)) quarters.push_back(quarter_e4m3(byte));
        const float u = bound_reference(certificate, row_data, quarters, rho[key], rho_e[key]);
        if (std::any_of(keys.key(key).begin(), keys.key(key).end(), is_nan_e4m3)) continue;  // exempt
        ASSERT_EQ(bits(bounds[key]), bits(alpha[key] * u)) << dim << ' ' << rows << ' ' << key;
      }
    }
  }
}

/// What norm_keys promises of one key: never less than the norms, and more only by 2^-16 and what multiples of 2^-5 in place of
/// small components add.
void expect_norms(std::span<const std::uint8_t> key, float rho, float rho_e) {
  double square = 0, square_e = 0, most = 0, most_e = 0;
  bool nan = false;
  for (const std::uint8_t byte : key) {
    nan = nan || is_nan_e4m3(byte);
    const double value = std::abs(static_cast<double>(kE4m3Table[byte]));
    const double rest = value - 4.0 * std::abs(quarter_e4m3(byte));
    const double coarse = std::ceil(value * 32) / 32 - value;
    square += value * value;
    square_e += rest * rest;
    most += (value + coarse) * (value + coarse);
    most_e += (std::abs(rest) + coarse) * (std::abs(rest) + coarse);
  }
  if (nan) {
    EXPECT_TRUE(std::isnan(rho));
    return;
  }
  constexpr double relative = 1 + 0x1p-16;
  const double root = std::sqrt(static_cast<double>(key.size()));
  if (square == 0) {
    EXPECT_EQ(rho, 0.0F);
  } else {
    EXPECT_GE(rho * root, std::max(std::sqrt(square), 0x1p-6));
    EXPECT_LE(rho * root, std::max(std::sqrt(most), 0x1p-6) * relative);
  }
  EXPECT_GE(rho_e * root, std::sqrt(square_e));
  EXPECT_LE(rho_e * root, std::sqrt(most_e) * relative);
  EXPECT_TRUE(square_e > 0 || rho_e == 0.0F);
}

/// The same in every way that norms are formed.
void expect_norms(const Kernels& kernels, const Panel& keys) {
  alignas(64) float panel[kMaxDimension * 48];
  float rho[48], rho_e[48];
  kernels.norm_keys(keys.rows, keys.dim, rho, rho_e);
  for (int key = 0; key < 48; ++key) expect_norms(keys.key(key), rho[key], rho_e[key]);

  kernels.pack_panel(keys.rows, keys.dim, panel);
  float panel_rho[48], panel_rho_e[48];
  kernels.norm_panel(panel, keys.dim, panel_rho, panel_rho_e);
  for (int key = 0; key < 48; ++key) expect_norms(keys.key(key), panel_rho[key], panel_rho_e[key]);

  if (kernels.pack_and_norm_panel_i8 == nullptr) return;
  alignas(64) std::uint32_t packed[kMaxDimension / 4 * 48], alone[kMaxDimension / 4 * 48];
  kernels.pack_panel_i8(keys.rows, keys.dim, alone);
  kernels.pack_and_norm_panel_i8(keys.rows, keys.dim, packed, panel_rho, panel_rho_e);
  EXPECT_TRUE(std::equal(packed, packed + keys.dim / 4 * 48, alone));
  for (int key = 0; key < 48; ++key) {
    EXPECT_EQ(bits(panel_rho[key]), bits(rho[key]));
    EXPECT_EQ(bits(panel_rho_e[key]), bits(rho_e[key]));
  }
}

TEST_P(KernelsTest, NormsAreRoundedUpButNotFar) {
  for (const int dim : {32, 64, 128}) {
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
      const Panel keys(dim, seed);
      expect_norms(kernels, keys);
    }
  }
}

// Beside large components the small ones, and what is rounded of them, would not show.
TEST_P(KernelsTest, NormsOfKeysOfOneMagnitude) {
  test::Random random(6);
  for (const int dim : {32, 64, 128}) {
    for (int magnitude = 0; magnitude < 128; ++magnitude) {
      Panel keys(dim, 0);
      std::fill(keys.bytes.begin(), keys.bytes.end(), std::uint8_t{0});
      for (int key = 0; key < 48; ++key) {  // one such component, a few, all
        const int count = key < 16 ? 1 : key < 32 ? 2 + key % 7 : dim;
        for (int i = 0; i < count; ++i) {
          const auto at = count == dim ? static_cast<std::size_t>(i) : random() % static_cast<std::size_t>(dim);
          keys.bytes[static_cast<std::size_t>(key * dim) + at] = static_cast<std::uint8_t>(magnitude | (random() & 0x80));
        }
      }
      expect_norms(kernels, keys);
    }
  }
}

TEST_P(KernelsTest, NormsOfSmallKeys) {
  test::Random random(7);
  for (const int dim : {32, 64, 128}) {
    // Magnitudes below: 2^-6 (subnormal), 2^-5, 1/4 (counted in steps of 2^-5), 4 (a quarter of 0 or 1).
    for (const int below : {0x08, 0x10, 0x28, 0x48}) {
      for (int trial = 0; trial < 20; ++trial) {
        Panel keys(dim, 0);
        for (auto& byte : keys.bytes) {
          byte = static_cast<std::uint8_t>(random() % static_cast<std::uint64_t>(below) | (random() & 0x80));
        }
        expect_norms(kernels, keys);
      }
    }
  }
}

TEST_P(KernelsTest, ZeroKeysHaveNoNorm) {
  Panel keys(128, 0);
  for (std::size_t i = 0; i < keys.bytes.size(); ++i) keys.bytes[i] = i % 3 == 0 ? 0x80 : 0;
  float rho[48], rho_e[48];
  kernels.norm_keys(keys.rows, keys.dim, rho, rho_e);
  for (int key = 0; key < 48; ++key) {
    EXPECT_EQ(bits(rho[key]), 0U);
    EXPECT_EQ(bits(rho_e[key]), 0U);
  }
}

TEST_P(KernelsTest, ExemptKeysAreCountedAndNeverRejected) {
  test::Random random(8);
  const std::array<float, 9> scales{1.0F, 0.0F, -0.0F, 1e-45F, 3e38F, -1e-45F, -3.0F, kInf, kNaN};
  // One reason in a panel, several, none.
  for (const auto& [dim, odd_scales, nans] :
       {std::tuple{32, 2, 40}, {32, 40, 1000}, {64, 1000, 40}, {128, 2, 3}, {128, 1000, 40}, {128, 1000, 1000}}) {
    const std::int64_t count = 3 * kPanelKeys - 7;  // the last panel is short
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count * dim));
    for (auto& byte : bytes) {
      byte = static_cast<std::uint8_t>(random());
      if (is_nan_e4m3(byte)) byte ^= 1;
    }
    std::vector<float> scale(static_cast<std::size_t>(count));
    std::int64_t expected = 0;
    for (std::int64_t key = 0; key < count; ++key) {
      const float s = random() % static_cast<unsigned>(odd_scales) == 0 ? scales[random() % scales.size()] : 0.5F;
      scale[static_cast<std::size_t>(key)] = s;
      const bool nan = random() % static_cast<unsigned>(nans) == 0;
      const auto at = static_cast<std::size_t>(key * dim) + random() % static_cast<std::size_t>(dim);
      if (nan) bytes[at] = random() % 2 == 0 ? 0x7F : 0xFF;
      expected += nan || !(s >= 0.0F) || s == kInf ? 1 : 0;
    }
    Problem problem;
    problem.k = dense_view<const void>(bytes.data(), DType::f8_e4m3, {count, dim});
    problem.k_scale = dense_view<const void>(scale.data(), DType::f32, {count});
    const KeySource source{KeyRows(problem, 0), count, dim};

    std::vector<float> alpha(3 * kPanelKeys, kNaN), rho = alpha, rho_e = alpha;
    EXPECT_EQ(summarize_keys(kernels, source, 0, 3 * kPanelKeys, {alpha.data(), rho.data(), rho_e.data()}), expected);
    for (std::int64_t key = 0; key < count; ++key) {
      const auto at = static_cast<std::size_t>(key);
      const std::span row(bytes.data() + key * dim, static_cast<std::size_t>(dim));
      const float s = scale[at];
      if (std::ranges::any_of(row, is_nan_e4m3) || !(s >= 0.0F) || s == kInf) {
        EXPECT_EQ(alpha[at], 1.0F);
        EXPECT_EQ(rho[at], kInf);
        EXPECT_EQ(rho_e[at], 0.0F);
      } else {
        EXPECT_EQ(bits(alpha[at]), bits(s));
        expect_norms(row, rho[at], rho_e[at]);
      }
    }
    for (std::size_t at = static_cast<std::size_t>(count); at < alpha.size(); ++at) {  // no keys: no reason to be exempt
      EXPECT_EQ(alpha[at], 0.0F);
      EXPECT_EQ(rho[at], 0.0F);
    }
  }
}

TEST(Keys, OneOddKeyOfAPanelIsExempt) {
  const auto exempt = [](int key, float odd_scale, float odd_rho) {
    std::vector<float> scale(48, 0.5F), alpha(48), rho(48, 2.0F), rho_e(48, 0.25F);
    scale[static_cast<std::size_t>(key)] = odd_scale;
    rho[static_cast<std::size_t>(key)] = odd_rho;
    const std::uint64_t mask = exempt_odd_keys(scale.data(), {alpha.data(), rho.data(), rho_e.data()});
    for (int i = 0; i < 48; ++i) {
      const auto at = static_cast<std::size_t>(i);
      EXPECT_EQ(alpha[at], (mask >> i & 1) != 0 ? 1.0F : scale[at]);
      EXPECT_EQ(rho[at], (mask >> i & 1) != 0 ? kInf : i == key ? odd_rho : 2.0F);
      EXPECT_EQ(rho_e[at], (mask >> i & 1) != 0 ? 0.0F : 0.25F);
    }
    return mask;
  };
  for (const int key : {0, 15, 47}) {
    for (const float scale : {-1.0F, -1e-45F, kInf, -kInf, kNaN}) EXPECT_EQ(exempt(key, scale, 2.0F), std::uint64_t{1} << key);
    for (const float scale : {0.0F, -0.0F, 1e-45F, 3e38F}) EXPECT_EQ(exempt(key, scale, 2.0F), 0U);
    EXPECT_EQ(exempt(key, 0.5F, kNaN), std::uint64_t{1} << key);
  }
}

TEST_P(KernelsTest, CollectKeepsOrderNaNAndTies) {
  test::Random random(5);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<float> u(random() % 200);
    for (float& value : u) {
      const auto kind = random() % 20;
      value = kind == 0   ? kNaN
              : kind == 1 ? kInf
              : kind == 2 ? -kInf
              : kind == 3 ? -0.0F
                          : static_cast<float>(random() % 9) - 4.0F;
    }
    const float low = std::array{-kInf, -2.0F, 0.0F, -0.0F, 3.0F, kInf}[random() % 6];
    const float high = std::array{1.0F, 4.0F, kInf}[random() % 3];
    const auto n = static_cast<std::int64_t>(u.size());
    std::vector<std::int32_t> at_least, middle, out(u.size() + 1, 77);
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(n); ++i) {
      const float value = u[static_cast<std::size_t>(i)];
      if (!(value < low)) at_least.push_back(i);
      if (!(value < low) && value < high) middle.push_back(i);
    }
    const auto expect = [&](const std::vector<std::int32_t>& want, std::int64_t count) {
      ASSERT_EQ(count, static_cast<std::int64_t>(want.size()));
      ASSERT_TRUE(std::equal(want.begin(), want.end(), out.begin()));
      ASSERT_EQ(out.back(), 77);  // room for n is enough
    };
    expect(at_least, kernels.collect_at_least(u.data(), n, low, out.data()));
    expect(middle, kernels.collect_between(u.data(), n, low, high, out.data()));
  }
}

std::string name_of(const ::testing::TestParamInfo<const Kernels*>& kernels) {
  return std::string(kernels.param->name);
}

INSTANTIATE_TEST_SUITE_P(Implementations, KernelsTest,
                         ::testing::ValuesIn(available_kernels().begin(), available_kernels().end()), name_of);

TEST(Kernels, AreListedAndFoundByName) {
  ASSERT_FALSE(available_kernels().empty());
  EXPECT_EQ(available_kernels().back()->name, "scalar");
  for (const Kernels* kernels : available_kernels()) EXPECT_EQ(find_kernels(kernels->name), kernels);
  EXPECT_EQ(find_kernels("avx9"), nullptr);
}

}  // namespace
}  // namespace dosa::cpu
