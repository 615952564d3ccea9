// C: short, empty, reversed rows and padding. I: causal ranges, chunks, context parallelism.
#include <algorithm>

#include "known_failures/support.hpp"

namespace dosa::test {
namespace {

Scores mixed(int count, std::uint64_t seed) {
  Random random(seed);
  return scores_of(count, [&](int) { return std::round(uniform(random, -20.0F, 20.0F)); });
}

/// The part of `c` that has rows [begin, end).
Case rows_of(const Case& c, std::int64_t begin, std::int64_t end) {
  Case part = c;
  part.nq = end - begin;
  const auto cut = [&](auto& array, std::int64_t width) {
    if (!array.empty()) array.assign(array.begin() + begin * width, array.begin() + end * width);
  };
  part.q = c.q;
  cut(part.q, c.heads * c.dim);
  cut(part.w, c.heads);
  cut(part.ks, 1);
  cut(part.ke, 1);
  return part;
}

TEST(KnownFailures, C1_PaddedSlotsOfLengthMinusOne) {
  Case c = explicit_scores(mixed(16384, 1), 1024, 5);
  c.ke = {16384, -1, 0, 16000, -1};
  expect_exact(c.problem(), many_ways());
}

TEST(KnownFailures, C2_MoreDraftTokensThanTokens) {
  Case c = explicit_scores(mixed(64, 2), 8, 4);
  c.ke = {-1, 0, 1, 2};
  expect_exact(c.problem(), many_ways());
}

TEST(KnownFailures, C3_AllLengthsZero) {
  for (const std::int64_t nq : {1, 32, 64}) {
    Case c = explicit_scores(mixed(128, 3), 16, nq);
    c.ke.assign(static_cast<std::size_t>(nq), 0);
    expect_exact(c.problem(), many_ways());
    c.ke.back() = 100;
    expect_exact(c.problem(), many_ways());
  }
}

TEST(KnownFailures, C4_FewerKeysThanK) {
  expect_exact_scores(mixed(100, 4), 2048, 3);
  expect_exact_scores({}, 2048, 3);
  expect_exact_scores({}, 1, 0);
  expect_exact_scores(mixed(100, 4), 10, 0);
  expect_exact_scores({1.0F}, 4096);
}

TEST(KnownFailures, C5_OutputKeepsItsWidth) { expect_exact_scores(mixed(2047, 5), 2048, 3); }

TEST(KnownFailures, C6_OddK) {
  for (const int nk : {705, 706}) expect_exact_scores(mixed(nk, 6), 705, 2);
  for (const int topk : {1, 3, 2047}) expect_exact_scores(mixed(5000, 6), topk, 2);
  for (const int nk : {2051, 2052, 8192}) expect_exact_scores(mixed(nk, 6), 2051);  // H4
}

TEST(KnownFailures, C7_EmptyRequestsInARaggedBatch) {
  Case c = explicit_scores(mixed(300, 7), 50, 8);
  c.ks = {0, 0, 0, 0, 128, 128, 128, 128};
  c.ke = {0, 0, 128, 128, 128, 128, 300, 300};
  expect_exact(c.problem(), many_ways());
}

TEST(KnownFailures, C8_NothingBeyondTheCausalEnd) {
  Case c = explicit_scores(mixed(100, 8), 8);
  c.ks = {10};
  c.ke = {15};
  expect_exact(c.problem(), many_ways());
  const OracleRow row = select(c.problem(), {})[0];
  EXPECT_EQ(Ids(row.ids.begin() + 5, row.ids.end()), (Ids{-1, -1, -1}));
  EXPECT_EQ(*std::max_element(row.ids.begin(), row.ids.end()), 14);
}

TEST(KnownFailures, C9_PaddingStaysMinusOneInEveryIndexSpace) {
  Case c = explicit_scores(mixed(8192, 9), 64, 8);
  for (int j = 0; j < 8; ++j) {
    c.ks.push_back(4096 * (j / 4));
    c.ke.push_back(4096 * (j / 4) + 10 * j);
  }
  std::vector<Options> ways = many_ways();
  for (Options& options : ways) options.index_space = IndexSpace::relative;
  expect_exact(c.problem(), ways);
  for (Options& options : ways) options.order = Order::ascending;
  expect_exact(c.problem(), ways);
}

TEST(KnownFailures, C10_PaddingIsMinusOneNotZero) {
  Case c = explicit_scores(mixed(10, 10), 512);
  expect_exact(c.problem(), many_ways());
  const OracleRow row = select(c.problem(), {})[0];
  EXPECT_EQ(std::count(row.ids.begin(), row.ids.end(), -1), 502);
  EXPECT_EQ(std::count(row.ids.begin(), row.ids.end(), 0), 1);
}

TEST(KnownFailures, C11_ManyRowsOfAMediumContext) {
  Case c = explicit_scores(mixed(9 * 1024, 11), 512, 256);
  make_causal(c);
  expect_exact(c.problem(), fast_ways());
}

TEST(KnownFailures, C12_WritesAllItsRowsAndNoOthers) {
  const Case c = explicit_scores(mixed(40, 12), 64, 5);
  std::vector<std::int32_t> ids(8 * 64, 0x7FFFFFFF);
  const std::int64_t shape[] = {5, 64};
  auto indexer = Indexer::create();
  const auto plan = indexer->plan(shape_of(c.problem()));
  ASSERT_TRUE(plan);
  ASSERT_TRUE(indexer->run(*plan, c.problem(), {dense_view<void>(ids.data(), DType::i32, shape), {}}));
  EXPECT_EQ(std::count(ids.begin(), ids.begin() + 5 * 64, 0x7FFFFFFF), 0);
  EXPECT_EQ(std::count(ids.begin() + 5 * 64, ids.end(), 0x7FFFFFFF), 3 * 64);
}

TEST(KnownFailures, C13_PaddedOutputRows) {  // exact() puts canaries into a gap of 16 after every row
  expect_exact_scores(mixed(5000, 13), 2048, 3);
  expect_exact_scores(mixed(1000, 13), 2048, 3);
}

TEST(KnownFailures, I1_ChunksOfQueriesKeepTheirCausalRange) {
  Case c = explicit_scores(mixed(256, 21), 32, 256);
  make_causal(c);
  const auto whole = expected_rows(c.problem());
  for (std::int64_t begin = 0; begin < 256; begin += 100) {
    const std::int64_t end = std::min<std::int64_t>(begin + 100, 256);
    const std::vector<OracleRow> want(whole.begin() + begin, whole.begin() + end);
    for (const Options& options : many_ways()) EXPECT_TRUE(exact(rows_of(c, begin, end).problem(), want, options));
  }
}

TEST(KnownFailures, I3_TheFutureScoresBest) {
  Case c = explicit_scores(scores_of(3000, [](int i) { return static_cast<float>(i + 1); }), 100, 40);
  make_causal(c);
  expect_exact(c.problem(), many_ways());
  for (const Options& options : fast_ways()) {
    const auto rows = select(c.problem(), options);
    for (std::size_t j = 0; j < rows.size(); ++j) EXPECT_EQ(rows[j].ids[0], c.ke[j] - 1);
  }
}

TEST(KnownFailures, I4_ZigZagContextParallelism) {
  Case c = random_case(24, 64, 2000, 4, 32, 100);
  make_causal(c);
  const auto whole = expected_rows(c.problem());
  Case zig = rows_of(c, 0, 16);
  const Case zag = rows_of(c, 48, 64);
  zig.nq = 32;
  zig.q.insert(zig.q.end(), zag.q.begin(), zag.q.end());
  zig.w.insert(zig.w.end(), zag.w.begin(), zag.w.end());
  zig.ke.insert(zig.ke.end(), zag.ke.begin(), zag.ke.end());
  std::vector<OracleRow> want(whole.begin(), whole.begin() + 16);
  want.insert(want.end(), whole.begin() + 48, whole.end());
  for (const Options& options : many_ways()) EXPECT_TRUE(exact(zig.problem(), want, options));
}

TEST(KnownFailures, I6_GrowingPastK) {
  Case c = explicit_scores(mixed(2050, 26), 2048);
  for (const int length : {2047, 2048, 2049, 2050}) {
    c.ke = {length};
    expect_exact(c.problem(), many_ways());
  }
}

TEST(KnownFailures, I7_MixedRequestsInChunksOfRows) {
  Case c = random_case(27, 300, 3000, 2, 32, 64);
  int key = 0;
  for (int request = 0; request < 9; ++request) {
    const int length = request == 8 ? 3000 - key : 30 + 57 * request;
    for (int j = request * 300 / 9; j < (request + 1) * 300 / 9; ++j) {
      c.ks.push_back(key);
      c.ke.push_back(std::min(key + length - (j % 20), 3000));
    }
    key += length;
  }
  const auto whole = expected_rows(c.problem());
  for (std::int64_t begin = 0; begin < 300; begin += 128) {
    const std::int64_t end = std::min<std::int64_t>(begin + 128, 300);
    const std::vector<OracleRow> want(whole.begin() + begin, whole.begin() + end);
    for (const Options& options : fast_ways()) EXPECT_TRUE(exact(rows_of(c, begin, end).problem(), want, options));
  }
  for (const Options& options : many_ways()) EXPECT_TRUE(exact(c.problem(), whole, options));
}

TEST(KnownFailures, F7_WholeAndOneRowAtATime) {
  Case c = random_case(7, 12, 1500, 6, 64, 70);
  make_causal(c);
  const auto whole = expected_rows(c.problem());
  for (std::int64_t j = 0; j < c.nq; ++j) {
    for (const Options& options : fast_ways()) {
      EXPECT_TRUE(exact(rows_of(c, j, j + 1).problem(), {whole[static_cast<std::size_t>(j)]}, options));
    }
  }
}

}  // namespace
}  // namespace dosa::test
