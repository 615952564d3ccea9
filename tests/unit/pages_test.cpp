// Writing, reading and moving keys in pages, and steps of decoding as problems.
#include "dosa/pages.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include "dosa/decode.hpp"
#include "dosa/indexer.hpp"
#include "score/quantize.hpp"
#include "support/cases.hpp"

namespace dosa::test {
namespace {

constexpr std::int64_t kDim = 64;

/// A pool of guarded pages.
struct Pool {
  std::int64_t pages, page_size, stride;
  std::vector<std::uint8_t> bytes;

  Pool(std::int64_t pages_, std::int64_t page_size_, std::int64_t gap)
      : pages(pages_),
        page_size(page_size_),
        stride(page_size_ * (kDim + 4) + gap),
        bytes(static_cast<std::size_t>(pages_ * stride), 0xA5) {}

  [[nodiscard]] MutableTensorView view() {
    auto view = dense_view<void>(bytes.data(), DType::f8_e4m3, {pages, page_size, 1, kDim + 4});
    view.stride[0] = stride;
    return view;
  }
  [[nodiscard]] TensorView view() const {
    auto view = dense_view<const void>(bytes.data(), DType::f8_e4m3, {pages, page_size, 1, kDim + 4});
    view.stride[0] = stride;
    return view;
  }
  [[nodiscard]] const std::uint8_t* key(std::int64_t slot) const {
    return bytes.data() + slot / page_size * stride + slot % page_size * kDim;
  }
  [[nodiscard]] float scale(std::int64_t slot) const {
    float scale = 0;
    std::memcpy(&scale, bytes.data() + slot / page_size * stride + page_size * kDim + slot % page_size * 4, 4);
    return scale;
  }
};

std::vector<float> random_rows(std::int64_t n, std::uint64_t seed) {
  Random random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(n * kDim));
  for (float& x : rows) x = normal(random) * std::exp(3 * normal(random));
  return rows;
}

TensorView ids(const std::vector<std::int32_t>& array) {
  return dense_view<const void>(array.data(), DType::i32, {static_cast<std::int64_t>(array.size())});
}

TEST(Pages, InsertWritesWhatQuantisationGivesAndNothingElse) {
  const std::vector<float> rows = random_rows(5, 1);
  const std::vector<std::int32_t> slots = {33, -1, 0, 95, 31};
  for (const QuantizeRule rule : {QuantizeRule{}, QuantizeRule{ScaleRule::power_of_two, 1e-10F}}) {
    Pool pool(3, 32, 12);
    const auto keys = dense_view<const void>(rows.data(), DType::f32, {5, kDim});
    ASSERT_TRUE(insert_keys(pool.view(), keys, ids(slots), rule));
    Pool expected(3, 32, 12);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] < 0) continue;
      std::uint8_t* page = expected.bytes.data() + slots[i] / 32 * expected.stride;
      const float scale = quantize_row(std::span(rows).subspan(i * kDim, kDim), {page + slots[i] % 32 * kDim, kDim},
                                       rule.scale, rule.floor);
      std::memcpy(page + 32 * kDim + slots[i] % 32 * 4, &scale, 4);
    }
    EXPECT_EQ(pool.bytes, expected.bytes);
  }
}

TEST(Pages, InsertTakesBf16AndAnyStrides) {
  const std::vector<float> rows = random_rows(4, 2);
  std::vector<std::uint16_t> half(rows.size() * 3, 0x7FC0);
  std::vector<float> rounded(rows.size());
  for (std::size_t n = 0; n < rows.size(); ++n) {
    half[n * 3] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(rows[n]) >> 16);
    rounded[n] = std::bit_cast<float>(static_cast<std::uint32_t>(half[n * 3]) << 16);
  }
  auto strided = dense_view<const void>(half.data(), DType::bf16, {4, kDim});
  strided.stride = {3 * kDim, 3};
  const std::vector<std::int32_t> slots = {1, 5, 9, 2};
  Pool a(1, 16, 0), b(1, 16, 0);
  ASSERT_TRUE(insert_keys(a.view(), strided, ids(slots)));
  ASSERT_TRUE(insert_keys(b.view(), dense_view<const void>(rounded.data(), DType::f32, {4, kDim}), ids(slots)));
  EXPECT_EQ(a.bytes, b.bytes);
}

TEST(Pages, MovesAreBitForBitAndInOrder) {
  // Any bytes at all: NaN scales and NaN bytes too.
  Pool from(4, 16, 4);
  Random random(3);
  for (std::uint8_t& byte : from.bytes) byte = static_cast<std::uint8_t>(random());
  const Pool before = from;
  Pool to(2, 64, 8);
  const std::vector<std::int32_t> source = {63, 0, 17, -1, 20}, target = {0, 127, 64, 3, -1};
  ASSERT_TRUE(move_keys(before.view(), ids(source), to.view(), ids(target)));
  for (const std::size_t n : {0U, 1U, 2U}) {
    EXPECT_EQ(std::memcmp(to.key(target[n]), before.key(source[n]), kDim), 0);
    const float scale = to.scale(target[n]), expected = before.scale(source[n]);
    EXPECT_EQ(std::memcmp(&scale, &expected, 4), 0);
  }
  EXPECT_GE(std::ranges::count(to.bytes, 0xA5) + 3 * (kDim + 4), static_cast<std::int64_t>(to.bytes.size()));
  // Back again: the pool is what it was.
  Pool round = before;
  std::memset(round.bytes.data() + 3 * round.stride + 15 * kDim, 0, kDim);
  ASSERT_TRUE(move_keys(static_cast<const Pool&>(to).view(), ids({0}), round.view(), ids({63})));
  EXPECT_EQ(round.bytes, before.bytes);
  // Within one pool, a chain: the second pair reads what the first wrote.
  ASSERT_TRUE(move_keys(static_cast<const Pool&>(round).view(), ids({5, 6}), round.view(), ids({6, 7})));
  EXPECT_EQ(std::memcmp(round.key(7), before.key(5), kDim), 0);
}

TEST(Pages, InsertGatherRoundTripSelectsTheSame) {
  constexpr std::int64_t n = 200;
  const std::vector<float> rows = random_rows(n, 4);
  Pool pool(16, 16, 0);
  std::vector<std::int32_t> blocks, slots;
  for (std::int32_t b = 0; b < 13; ++b) blocks.push_back((b * 5 + 2) % 16);
  for (std::int32_t i = 0; i < n; ++i) slots.push_back(blocks[static_cast<std::size_t>(i / 16)] * 16 + i % 16);
  ASSERT_TRUE(insert_keys(pool.view(), dense_view<const void>(rows.data(), DType::f32, {n, kDim}), ids(slots)));
  std::vector<std::uint8_t> k(n * kDim);
  std::vector<float> k_scale(n);
  ASSERT_TRUE(gather_keys(static_cast<const Pool&>(pool).view(), ids(blocks), 0,
                          dense_view<void>(k.data(), DType::f8_e4m3, {n, kDim}),
                          dense_view<void>(k_scale.data(), DType::f32, {n})));
  for (std::size_t i = 0; i < n; ++i) {
    std::vector<std::uint8_t> expected(kDim);
    const float scale = quantize_row(std::span(rows).subspan(i * kDim, kDim), expected, ScaleRule::amax);
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), k.begin() + static_cast<std::ptrdiff_t>(i) * kDim)) << i;
    ASSERT_EQ(scale, k_scale[i]);
  }
}

TEST(Pages, RefuseBadArguments) {
  Pool pool(2, 16, 0);
  const Pool untouched = pool;
  const std::vector<float> rows = random_rows(2, 5);
  const auto keys = dense_view<const void>(rows.data(), DType::f32, {2, kDim});
  const auto message = [](const auto& result) { return result ? std::string("accepted") : result.error().message; };
  EXPECT_EQ(message(insert_keys(pool.view(), keys, ids({0, 32}))), "slots[1] is 32; the pool has slots 0 to 31");
  EXPECT_EQ(message(insert_keys(pool.view(), keys, ids({0}))), "slots has shape [1]; it must be [2]");
  auto odd = pool.view();
  odd.stride[0] = 1090;
  EXPECT_EQ(message(insert_keys(odd, keys, ids({0, 1}))),
            "kv_cache has pages 1090 bytes apart; it must be a multiple of 4");
  odd = pool.view();
  odd.shape[1] = 48;
  EXPECT_EQ(message(insert_keys(odd, keys, ids({0, 1}))), "page_size is 48; pages have 16 to 256 keys, a power of two");
  odd = pool.view();
  odd.shape[3] = 64;
  EXPECT_EQ(message(insert_keys(odd, keys, ids({0, 1}))),
            "kv_cache has shape [2, 16, 1, 64]; it must be [2, 16, 1, 68]");
  odd = pool.view();
  odd.data = pool.bytes.data() + 2;
  EXPECT_EQ(message(insert_keys(odd, keys, ids({0, 1}))), "kv_cache is not aligned to 4 bytes, as its scales need");
  EXPECT_EQ(message(move_keys(untouched.view(), ids({1, 2}), pool.view(), ids({3, 40}))),
            "to_slots[1] is 40; the pool has slots 0 to 31");
  EXPECT_EQ(message(move_keys(untouched.view(), ids({1, 2}), pool.view(), ids({3}))),
            "to_slots has shape [1]; it must be [2]");
  EXPECT_EQ(pool.bytes, untouched.bytes);

  std::vector<std::uint8_t> k(kDim);
  float scale = 0;
  const auto gather = [&](const std::vector<std::int32_t>& blocks, std::int64_t first) {
    return message(gather_keys(untouched.view(), ids(blocks), first,
                               dense_view<void>(k.data(), DType::f8_e4m3, {1, kDim}),
                               dense_view<void>(&scale, DType::f32, {1})));
  };
  EXPECT_EQ(gather({0, 2}, 16), "blocks[1] is 2; pages are 0 to 1");
  EXPECT_EQ(gather({0, -1}, 31), "blocks[1] is -1; pages are 0 to 1");
  EXPECT_EQ(gather({0, -1}, 15), "accepted");
  EXPECT_EQ(gather({0, 1}, 32), "positions 32 to 32 are asked for; the 2 blocks hold 0 to 31");
  EXPECT_EQ(gather({0, 1}, -1), "positions -1 to -1 are asked for; the 2 blocks hold 0 to 31");
}

TEST(Decode, AStepIsAProblem) {
  std::vector<std::uint8_t> q(2 * 3 * 4 * 32), cache(36 * 16 * 2);
  std::vector<float> w(6 * 4);
  std::vector<std::int32_t> table(2), lens(6);
  DecodeStep step{dense_view<const void>(q.data(), DType::f8_e4m3, {2, 3, 4, 32}),
                  dense_view<const void>(w.data(), DType::f32, {6, 4}),
                  dense_view<const void>(cache.data(), DType::f8_e4m3, {2, 16, 1, 36}),
                  dense_view<const void>(table.data(), DType::i32, {2, 1}),
                  dense_view<const void>(lens.data(), DType::i32, {2, 3}),
                  9};
  const auto problem = decode_problem(step);
  ASSERT_TRUE(problem);
  EXPECT_EQ(shape_of(*problem), (ProblemShape{6, 16, 4, 32, 9, 2, 16}));
  EXPECT_EQ(problem->q.at<std::uint8_t>(5, 3, 31), step.q.at<std::uint8_t>(1, 2, 3, 31));
  EXPECT_TRUE(Indexer::create()->plan(shape_of(*problem)));

  const auto refuse = [&](auto&& spoil, const std::string& what) {
    DecodeStep bad = step;
    spoil(bad);
    const auto result = decode_problem(bad);
    ASSERT_FALSE(result) << what;
    EXPECT_EQ(result.error().message, what);
  };
  refuse([](DecodeStep& s) { s.q.rank = 3; }, "q has 3 dimensions; it must be [B, next_n, heads, dim]");
  refuse([](DecodeStep& s) { s.q.shape[1] = 9; }, "next_n is 9; allowed are 1 to 8");
  refuse([](DecodeStep& s) { s.q.stride[0] += 32; },
         "q has stride 416 between requests; it must be next_n times that between draft tokens, 384");
  refuse([](DecodeStep& s) { s.context_lens.shape[1] = 2; },
         "context_lens has 2 dimensions of 2 and 2; it must be [2, 3]");
  refuse([](DecodeStep& s) { s.block_table.shape[0] = 3; },
         "block_table has 2 dimensions and 3 rows; it must be [2, max_blocks]");
}

}  // namespace
}  // namespace dosa::test
