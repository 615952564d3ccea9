// The definition against its reference semantics: dequantise per page, score in floating point, take the best 2048.
#include "dosa/flashinfer_bench.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <span>

#include <gtest/gtest.h>

#include "base/dtype.hpp"
#include "base/numeric.hpp"
#include "dosa/pages.hpp"
#include "support/cases.hpp"

namespace dosa::test {
namespace {

constexpr std::int64_t kHeads = 64, kDim = 128, kPageSize = 64, kTopk = 2048, kWidth = kDim + 4;

struct Workload {
  std::int64_t batch, pages, blocks;
  std::vector<std::uint8_t> q, cache;
  std::vector<float> w;
  std::vector<std::int32_t> lens, table;

  /// Pages as the definition's evaluator fills them: packed rows of a normal distribution.
  Workload(std::vector<std::int32_t> lengths, std::int64_t max_pages, std::uint64_t seed)
      : batch(static_cast<std::int64_t>(lengths.size())),
        pages(batch * max_pages + 3),
        blocks(max_pages),
        lens(std::move(lengths)) {
    Random random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> rows(static_cast<std::size_t>(pages * kPageSize * kDim));
    for (float& x : rows) x = normal(random);
    cache.resize(static_cast<std::size_t>(pages * kPageSize * kWidth));
    std::vector<std::int32_t> slots(static_cast<std::size_t>(pages * kPageSize));
    std::iota(slots.begin(), slots.end(), 0);
    EXPECT_TRUE(insert_keys(dense_view<void>(cache.data(), DType::f8_e4m3, {pages, kPageSize, 1, kWidth}),
                            dense_view<const void>(rows.data(), DType::f32, {pages * kPageSize, kDim}),
                            dense_view<const void>(slots.data(), DType::i32, {pages * kPageSize})));
    std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    table.assign(order.begin(), order.begin() + batch * blocks);
    for (std::int64_t n = 0; n < batch * kHeads * kDim; ++n) {
      const auto byte = static_cast<std::uint8_t>(random());
      q.push_back(is_nan_e4m3(byte) ? 0 : byte & 0xBF);  // below 2 in size
    }
    for (std::int64_t n = 0; n < batch * kHeads; ++n) w.push_back(normal(random));
  }

  [[nodiscard]] Result<void> run(std::vector<std::int32_t>& ids) const {
    ids.assign(static_cast<std::size_t>(batch * kTopk), 0x7FFFFFFF);
    return dsa_topk_indexer_fp8_h64_d128_topk2048_ps64(
        dense_view<const void>(q.data(), DType::f8_e4m3, {batch, kHeads, kDim}),
        dense_view<const void>(cache.data(), DType::f8_e4m3, {pages, kPageSize, 1, kWidth}),
        dense_view<const void>(w.data(), DType::f32, {batch, kHeads}),
        dense_view<const void>(lens.data(), DType::i32, {batch}),
        dense_view<const void>(table.data(), DType::i32, {batch, blocks}),
        dense_view<void>(ids.data(), DType::i32, {batch, kTopk}));
  }

  /// Score of a slot for a sequence, in double, and what an f32 scorer may be off by.
  [[nodiscard]] std::pair<double, double> score(std::int64_t sequence, std::int32_t slot) const {
    const std::uint8_t* page = cache.data() + slot / kPageSize * kPageSize * kWidth;
    float scale = 0;
    std::memcpy(&scale, page + kPageSize * kDim + slot % kPageSize * 4, 4);
    double sum = 0, size = 0;
    for (std::int64_t h = 0; h < kHeads; ++h) {
      double dot = 0, magnitude = 0;
      for (std::int64_t d = 0; d < kDim; ++d) {
        const double product =
            static_cast<double>(kE4m3Table[q[static_cast<std::size_t>((sequence * kHeads + h) * kDim + d)]]) *
            static_cast<double>(kE4m3Table[page[slot % kPageSize * kDim + d]]);
        dot += product;
        magnitude += std::fabs(product);
      }
      const double weight = w[static_cast<std::size_t>(sequence * kHeads + h)];
      sum += weight * std::max(dot, 0.0);
      size += std::fabs(weight) * magnitude;
    }
    return {scale * sum, scale * size * gamma_n(kDim + kHeads + 1)};
  }
};

TEST(FlashInferBench, SelectsWhatTheReferenceSelects) {
  const Workload load({0, 1, 63, 64, 65, 2047, 2048, 2049, 3000, 5120}, 80, 1);
  std::vector<std::int32_t> ids;
  const auto ran = load.run(ids);
  ASSERT_TRUE(ran) << ran.error().message;
  for (std::int64_t b = 0; b < load.batch; ++b) {
    const std::int64_t length = load.lens[static_cast<std::size_t>(b)];
    std::vector<std::int32_t> slots;
    for (std::int64_t p = 0; p < length; ++p) {
      slots.push_back(load.table[static_cast<std::size_t>(b * load.blocks + p / kPageSize)] * 64 +
                      static_cast<std::int32_t>(p % 64));
    }
    const auto row = std::span(ids).subspan(static_cast<std::size_t>(b * kTopk), kTopk);
    const auto valid = static_cast<std::size_t>(std::min(length, kTopk));
    EXPECT_TRUE(std::all_of(row.begin() + static_cast<std::ptrdiff_t>(valid), row.end(),
                            [](std::int32_t id) { return id == -1; }));
    const std::set<std::int32_t> chosen(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(valid));
    ASSERT_EQ(chosen.size(), valid);
    const std::set<std::int32_t> seen(slots.begin(), slots.end());
    EXPECT_TRUE(std::includes(seen.begin(), seen.end(), chosen.begin(), chosen.end()));
    // No key that was left out scores above one that was chosen, beyond what rounding explains.
    double worst = std::numeric_limits<double>::infinity(), best = -worst;
    for (const std::int32_t slot : seen) {
      const auto [score, error] = load.score(b, slot);
      if (chosen.contains(slot)) {
        worst = std::min(worst, score + error);
      } else {
        best = std::max(best, score - error);
      }
    }
    EXPECT_GE(worst, best) << "length " << length;
  }
}

TEST(FlashInferBench, RefusesWhatTheDefinitionDoesNotSay) {
  Workload load({100}, 2, 2);
  std::vector<std::int32_t> ids;
  ASSERT_TRUE(load.run(ids));
  Workload outside = load;
  outside.table[1] = 5;
  auto ran = outside.run(ids);
  ASSERT_FALSE(ran);
  EXPECT_EQ(ran.error().message, "block_table[0, 1] is 5, which row 0 sees; pages are 0 to 4");
  EXPECT_EQ(ids[0], 0x7FFFFFFF);
  const auto narrow = dsa_topk_indexer_fp8_h64_d128_topk2048_ps64(
      dense_view<const void>(load.q.data(), DType::f8_e4m3, {1, 32, kDim}), {}, {}, {}, {}, {});
  ASSERT_FALSE(narrow);
  EXPECT_EQ(narrow.error().message, "q_index_fp8 has shape [1, 32, 128]; it must be [1, 64, 128]");
}

}  // namespace
}  // namespace dosa::test
