// D: 32-bit offsets and big sizes, with huge strides over sparse memory. E: strides and alignment. Of both, what concerns
// pages is in pages_test.cpp.
#include <algorithm>
#include <cstring>

#include "known_failures/support.hpp"
#include "support/sparse.hpp"

namespace dosa::test {
namespace {

Scores many_scores(int count) {
  Random random(static_cast<std::uint64_t>(count));
  return scores_of(count, [&](int) { return uniform(random, -9.0F, 9.0F); });
}

/// Every row sees at most `width` keys somewhere in the range.
void make_windows(Case& c, int width, std::uint64_t seed) {
  Random random(seed);
  c.ks.clear();
  c.ke.clear();
  for (std::int64_t j = 0; j < c.nq; ++j) {
    const auto begin = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(c.nk));
    c.ks.push_back(begin);
    c.ke.push_back(begin + static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(width)));
  }
}

/// Keys `stride` bytes apart. Where an offset cut to 31 or 32 bits would land, there is poison.
void expect_exact_with_key_stride(std::int64_t nk, std::int64_t stride) {
  const Case c = random_case(1, 2, nk, 4, 32, 100);
  Problem problem = c.problem();
  const SparseMemory pool(static_cast<std::size_t>(nk * stride));
  auto* bytes = pool.as<std::uint8_t>();
  for (std::int64_t i = 0; i < nk; ++i) {
    for (const std::int64_t wrap : {std::int64_t{1} << 31, std::int64_t{1} << 32}) {
      if (i * stride >= wrap) std::memset(bytes + i * stride % wrap, 0x7F, 32);
    }
  }
  for (std::int64_t i = 0; i < nk; ++i) std::copy_n(c.k.begin() + i * 32, 32, bytes + i * stride);
  problem.k.data = bytes;
  problem.k.stride = {stride, 1};
  const auto expected = expected_rows(c.problem());
  for (const Options& options : fast_ways()) EXPECT_TRUE(exact(problem, expected, options));
}

TEST(KnownFailures, D1_KeyStrideOfOneMebibyte) { expect_exact_with_key_stride(2300, 1048576); }

TEST(KnownFailures, D3_KeyOffsetsBeyond4GiBMeetPoisonWhenWrapped) { expect_exact_with_key_stride(4565, 1435968); }

TEST(KnownFailures, D5_ScaleOffsetsBeyond32Bits) {
  const Case c = random_case(5, 2, 8201, 4, 32, 100);
  Problem problem = c.problem();
  constexpr std::int64_t stride = 262144;
  const SparseMemory pool(8201 * stride * sizeof(float));
  for (std::int64_t i = 0; i < c.nk; ++i) pool.as<float>()[i * stride] = c.k_scale[static_cast<std::size_t>(i)];
  problem.k_scale.data = pool.as<float>();
  problem.k_scale.stride = {stride};
  const auto expected = expected_rows(c.problem());
  for (const Options& options : fast_ways()) EXPECT_TRUE(exact(problem, expected, options));
}

TEST(KnownFailures, D2_MoreQueryKeyPairsThan32Bits) {
  Case c = explicit_scores(many_scores(1 << 20), 16, 3000);
  make_windows(c, 200, 2);
  expect_exact(c.problem(), fast_ways());
}

TEST(KnownFailures, D6_OddBigContexts) {
  for (const int nk : {262209, (1 << 20) + 1}) {
    Case c = explicit_scores(many_scores(nk), 2048, nk < 300000 ? 4096 : 64);
    make_windows(c, 100, 6);
    c.ks[3] = 0;
    c.ke[3] = nk;
    c.ks.back() = 1;
    c.ke.back() = nk;
    Options dosa;
    dosa.method = Method::dosa;
    expect_exact(c.problem(), {Options{}, dosa});
  }
}

TEST(KnownFailures, D7_OutputRowsBeyond4GiB) {
  const Case c = random_case(7, 4100, 300, 1, 32, 8);
  constexpr std::int64_t stride = 262144;  // elements: 1 MiB
  const SparseMemory ids(4100 * stride * 4);
  const SparseMemory scores(4100 * stride * 4);
  const auto view = [&](const SparseMemory& memory, DType dtype) {
    return MutableTensorView{memory.as<void>(), dtype, Device::cpu, 2, {4100, 8}, {stride, 1}};
  };
  auto indexer = Indexer::create();
  const auto plan = indexer->plan(shape_of(c.problem()));
  ASSERT_TRUE(plan);
  ASSERT_TRUE(indexer->run(*plan, c.problem(), {view(ids, DType::i32), view(scores, DType::f32)}));
  const auto expected = expected_rows(c.problem());
  for (std::int64_t j = 0; j < c.nq; ++j) {
    const OracleRow& row = expected[static_cast<std::size_t>(j)];
    ASSERT_TRUE(std::equal(row.ids.begin(), row.ids.end(), ids.as<std::int32_t>() + j * stride)) << j;
    ASSERT_TRUE(std::equal(row.scores.begin(), row.scores.end(), scores.as<float>() + j * stride)) << j;
  }
}

TEST(KnownFailures, D7_QueriesBeyond4GiB) {
  const Case c = random_case(7, 2500, 100, 2, 32, 8);
  constexpr std::int64_t stride = 2 << 20;
  const SparseMemory pool(2500 * stride);
  Problem problem = c.problem();
  for (std::int64_t j = 0; j < c.nq; ++j) std::copy_n(c.q.begin() + j * 64, 64, pool.as<std::uint8_t>() + j * stride);
  problem.q.data = pool.as<void>();
  problem.q.stride = {stride, 32, 1};
  const auto expected = expected_rows(c.problem());
  for (const Options& options : fast_ways()) EXPECT_TRUE(exact(problem, expected, options));
}

TEST(KnownFailures, D8_HeadQueryKeyTriplesBeyond32Bits) {
  Case c = explicit_scores(many_scores(1 << 20), 16, 4096, 4);
  make_windows(c, 60, 8);
  // The winners lie in the middle of what row 0 sees.
  c.ks[0] = 0;
  c.ke[0] = 1 << 20;
  for (std::size_t i = 500000; i < 500016; ++i) {
    std::copy_n(c.q.begin(), 32, c.k.begin() + static_cast<std::ptrdiff_t>(i * 32));
    c.k_scale[i] = 1e6F;
  }
  expect_exact(c.problem(), fast_ways());
}

TEST(KnownFailures, D9_ThousandsOfRowsOfLengthOne) {
  for (const int nq : {8192, 16384}) {
    Case c = explicit_scores({3.0F, 4.0F}, 1, nq);
    c.ke.assign(static_cast<std::size_t>(nq), 1);
    expect_exact(c.problem(), fast_ways());
  }
}

TEST(KnownFailures, D10_OneMoreColumnThan1024) {
  Random random(10);
  expect_exact_scores(scores_of(1025, [&](int) { return uniform(random, -1.0F, 1.0F); }), 16, 2);
}

TEST(KnownFailures, D11_WeightStrideIsNotTheHeadCount) {
  const Case c = random_case(11, 65, 200, 64, 32, 20);
  std::vector<float> wide(65 * 100, kNaN);
  for (std::size_t j = 0; j < 65; ++j)
    std::copy_n(c.w.begin() + static_cast<std::ptrdiff_t>(j * 64), 64,
                wide.begin() + static_cast<std::ptrdiff_t>(j * 100));
  Problem problem = c.problem();
  problem.w.data = wide.data();
  problem.w.stride = {100, 1};
  const auto expected = expected_rows(c.problem());
  for (const Options& options : many_ways()) EXPECT_TRUE(exact(problem, expected, options));
}

TEST(KnownFailures, E1_EveryTensorStrided) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    Case c = random_case(seed, 5, 700, 1 + static_cast<int>(seed), seed % 2 == 0 ? 64 : 128, 50);
    make_ragged(c, seed);
    if (seed % 3 == 0) c.hints = {5, 700, -1, 5, 17, 699};
    const auto expected = expected_rows(c.problem());
    for (const Options& options : many_ways()) {
      EXPECT_TRUE(exact(StridedCase(c, seed).problem(), expected, options)) << "seed " << seed;
    }
  }
}

TEST(KnownFailures, E1_BroadcastTensors) {
  const Case c = random_case(1, 4, 900, 8, 64, 40);
  Problem problem = c.problem();
  problem.q.stride[0] = 0;
  problem.w.stride[0] = 0;
  problem.k_scale.stride[0] = 0;
  expect_exact(problem, many_ways());
}

TEST(KnownFailures, E5_LengthsAroundMultiplesOf64) {
  Random random(5);
  const Scores scores = scores_of(257, [&](int) { return std::round(uniform(random, 0.0F, 30.0F)); });
  Case c = explicit_scores(scores, 40, 10);
  c.ke = {257, 1, 63, 64, 65, 127, 128, 129, 256, 255};
  expect_exact(c.problem(), many_ways());
  for (const std::int32_t nk : c.ke) {
    expect_exact_scores(Scores(scores.begin(), scores.begin() + nk), 40);
  }
}

TEST(KnownFailures, E7_UnalignedStarts) {
  Case c = random_case(7, 6, 1000, 8, 128, 100);
  c.ks = {1, 3, 7, 13, 0, 5};
  expect_exact(c.problem(), many_ways());
  // Base pointers aligned to their element type only.
  const auto shift = [](auto& array) { array.insert(array.begin(), array.front()); };
  const auto expected = expected_rows(c.problem());
  Case moved = c;
  shift(moved.q);
  shift(moved.k);
  shift(moved.k_scale);
  shift(moved.w);
  Problem problem = moved.problem();
  problem.q.data = moved.q.data() + 1;
  problem.k.data = moved.k.data() + 1;
  problem.k_scale.data = moved.k_scale.data() + 1;
  problem.w.data = moved.w.data() + 1;
  for (const Options& options : many_ways()) EXPECT_TRUE(exact(problem, expected, options));
}

TEST(KnownFailures, E9_TheScaleAloneDecides) {
  expect_exact_scores(scores_of(250, [](int i) { return std::ldexp(1.0F, 120 - i); }), 60);
  expect_exact_scores(scores_of(250, [](int i) { return -std::ldexp(1.0F, 120 - i); }), 60);
}

}  // namespace
}  // namespace dosa::test
