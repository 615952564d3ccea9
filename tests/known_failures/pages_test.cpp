// Keys in pages. D: offsets beyond 32 bits in pools of sparse memory. E: the layout of pages and tables. I: whose
// pages. expect_exact runs every other test of this folder in pages as well.
#include "dosa/pages.hpp"

#include <array>
#include <cstring>

#include "base/keys.hpp"
#include "known_failures/support.hpp"
#include "support/gpu.hpp"
#include "support/paged.hpp"
#include "support/sparse.hpp"

namespace dosa::test {
namespace {

constexpr std::int64_t kPage = 64;

std::vector<OracleRow> expected_of(const std::vector<Case>& cases) {
  std::vector<OracleRow> all;
  for (const Case& c : cases) {
    for (OracleRow& row : expected_rows(c.problem())) all.push_back(std::move(row));
  }
  return all;
}

std::vector<Problem> problems_of(const std::vector<Case>& cases) {
  std::vector<Problem> problems;
  for (const Case& c : cases) problems.push_back(c.problem());
  return problems;
}

void expect_exact_in_pages(const std::vector<Case>& cases, const std::vector<Options>& ways,
                           const PageLayout& layout = {}) {
  const PagedProblem paged(problems_of(cases), 1, layout);
  const auto expected = expected_of(cases);
  for (Options options : ways) {
    for (const IndexSpace space : {IndexSpace::absolute, IndexSpace::relative, IndexSpace::slot}) {
      options.index_space = space;
      EXPECT_TRUE(exact(paged.problem(), expected, options));
    }
  }
  expect_exact_on_gpu(paged.problem());
}

std::uint8_t* page_of(const SparseMemory& pool, std::int64_t stride, std::int64_t id) {
  return pool.as<std::uint8_t>() + id * stride;
}

/// Two pages of one request, of these ids and so far apart. Where an offset cut to 31 or 32 bits would land, there is
/// poison.
void expect_exact_in_high_pages(std::array<std::int32_t, 2> ids, std::int64_t stride) {
  const Case c = random_case(11, 2, 2 * kPage, 4, 32, 100);
  const std::int64_t pages = std::max(ids[0], ids[1]) + 1;
  const SparseMemory pool(static_cast<std::size_t>(pages * stride));
  constexpr std::int64_t page_bytes = kPage * 36;
  for (const std::int64_t id : ids) {
    for (const std::int64_t wrap : {std::int64_t{1} << 31, std::int64_t{1} << 32, std::int64_t{1} << 33}) {
      if (id * stride >= wrap) std::memset(pool.as<std::uint8_t>() + id * stride % wrap, 0x7F, page_bytes);
      if (id * stride / 4 >= wrap) std::memset(pool.as<std::uint8_t>() + id * stride / 4 % wrap * 4, 0x7F, page_bytes);
    }
  }
  for (std::size_t n = 0; n < 2; ++n) {
    std::uint8_t* page = page_of(pool, stride, ids[n]);
    std::copy_n(c.k.begin() + static_cast<std::ptrdiff_t>(n) * kPage * 32, kPage * 32, page);
    std::memcpy(page + kPage * 32, c.k_scale.data() + static_cast<std::ptrdiff_t>(n) * kPage, kPage * 4);
  }
  Problem problem = c.problem();
  problem.k = problem.k_scale = {};
  problem.kv_cache = dense_view<const void>(pool.as<const void>(), DType::f8_e4m3, {pages, kPage, 1, 36});
  problem.kv_cache.stride[0] = stride;
  problem.block_table = dense_view<const void>(ids.data(), DType::i32, {1, 2});
  const auto expected = expected_rows(c.problem());
  for (Options options : fast_ways()) {
    EXPECT_TRUE(exact(problem, expected, options));
    options.index_space = IndexSpace::slot;
    EXPECT_TRUE(exact(problem, expected, options));
  }
}

TEST(KnownFailures, D1_PagesOneMebibyteApart) { expect_exact_in_high_pages({0, 2200}, 1048576); }

TEST(KnownFailures, D3_PageOffsetsBeyond4GiBMeetPoisonWhenWrapped) { expect_exact_in_high_pages({4564, 17}, 1435968); }

TEST(KnownFailures, D5_ScaleOffsetsOfPagesBeyond32Bits) { expect_exact_in_high_pages({8200, 4103}, 262144 * 4); }

TEST(KnownFailures, D4_InsertAndGatherInHighPages) {
  constexpr std::int64_t stride = 1048576, pages = 4301, dim = 128, n = 150;
  const std::vector<std::int32_t> blocks = {2200, 4300, 0};
  const SparseMemory pool(pages * stride);
  MutableTensorView cache = dense_view<void>(pool.as<void>(), DType::f8_e4m3, {pages, kPage, 1, dim + 4});
  cache.stride[0] = stride;
  Random random(4);
  std::normal_distribution<float> normal;
  std::vector<float> keys(n * dim);
  std::ranges::generate(keys, [&] { return normal(random); });
  std::vector<std::int32_t> slots;
  for (std::int32_t i = 0; i < n; ++i)
    slots.push_back(static_cast<std::int32_t>(blocks[static_cast<std::size_t>(i / kPage)] * kPage + i % kPage));
  const TensorView slot_view = dense_view<const void>(slots.data(), DType::i32, {n});
  ASSERT_TRUE(insert_keys(cache, dense_view<const void>(keys.data(), DType::f32, {n, dim}), slot_view));

  std::vector<std::uint8_t> k(n * dim), dense_k(n * dim);
  std::vector<float> k_scale(n), dense_scale(n);
  const TensorView blocks_view = dense_view<const void>(blocks.data(), DType::i32, {3});
  const TensorView pages_view{cache.data, cache.dtype, cache.device, cache.rank, cache.shape, cache.stride};
  ASSERT_TRUE(gather_keys(pages_view, blocks_view, 0, dense_view<void>(k.data(), DType::f8_e4m3, {n, dim}),
                          dense_view<void>(k_scale.data(), DType::f32, {n})));
  // What inserting into one dense page after the other would have written, and where it lies.
  std::vector<std::uint8_t> dense(3 * kPage * (dim + 4));
  const MutableTensorView dense_cache = dense_view<void>(dense.data(), DType::f8_e4m3, {3, kPage, 1, dim + 4});
  std::vector<std::int32_t> in_order(n);
  for (std::int32_t i = 0; i < n; ++i) in_order[static_cast<std::size_t>(i)] = i;
  ASSERT_TRUE(insert_keys(dense_cache, dense_view<const void>(keys.data(), DType::f32, {n, dim}),
                          dense_view<const void>(in_order.data(), DType::i32, {n})));
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint8_t* page = dense.data() + i / kPage * kPage * (dim + 4);
    ASSERT_EQ(std::memcmp(k.data() + i * dim, page + i % kPage * dim, dim), 0) << i;
    ASSERT_EQ(std::memcmp(&k_scale[static_cast<std::size_t>(i)], page + kPage * dim + i % kPage * 4, 4), 0) << i;
    ASSERT_EQ(std::memcmp(page_of(pool, stride, blocks[static_cast<std::size_t>(i / kPage)]) + i % kPage * dim,
                          k.data() + i * dim, dim),
              0);
  }
}

TEST(KnownFailures, E2_EveryPositionOfEveryPage) {
  // One score per position: a misread position shows.
  Case c = explicit_scores(scores_of(130, [](int i) { return static_cast<float>((i * 37) % 130); }), 130);
  expect_exact_in_pages({c}, many_ways());
}

TEST(KnownFailures, E3_PagesArePlanar) {
  // Built by hand from the definition: 64 rows of bytes, then 64 scales. Read as 64 rows of 36 bytes, other keys would
  // win.
  constexpr std::int64_t dim = 32;
  std::vector<std::uint8_t> page(kPage * (dim + 4));
  for (std::int64_t i = 0; i < kPage; ++i) {
    page[static_cast<std::size_t>(i * dim)] = 0x38;
    const float scale = static_cast<float>((i * 23 + 5) % kPage);
    std::memcpy(page.data() + kPage * dim + i * 4, &scale, 4);
  }
  Case c = explicit_scores(scores_of(kPage, [](int i) { return static_cast<float>((i * 23 + 5) % kPage); }), 7);
  Problem problem = c.problem();
  const auto expected = expected_rows(problem);
  problem.k = problem.k_scale = {};
  problem.kv_cache = dense_view<const void>(page.data(), DType::f8_e4m3, {1, kPage, 1, dim + 4});
  const std::int32_t block = 0;
  problem.block_table = dense_view<const void>(&block, DType::i32, {1, 1});
  for (const Options& options : many_ways()) EXPECT_TRUE(exact(problem, expected, options));
  expect_exact_on_gpu(problem);
}

TEST(KnownFailures, E4_OtherLayoutsAreRefused) {
  const Case c = random_case(1, 1, 100, 2, 32, 5);
  const Problem contiguous = c.problem();
  const PagedProblem paged({&contiguous, 1}, 1);
  Problem shuffled = paged.problem();
  shuffled.kv_cache.stride[1] = 32;
  const auto indexer = Indexer::create();
  const auto plan = indexer->plan(shape_of(shuffled));
  std::vector<std::int32_t> ids(5, -9);
  std::vector<std::byte> memory(plan->workspace_bytes + 64);
  void* data = memory.data();
  std::size_t space = memory.size();
  std::align(64, plan->workspace_bytes, data, space);
  const auto ran = indexer->run(*plan, shuffled, {dense_view<void>(ids.data(), DType::i32, {1, 5}), {}},
                                {data, plan->workspace_bytes});
  ASSERT_FALSE(ran);
  EXPECT_EQ(ran.error().message, "kv_cache has strides 32 and 1 in a page; they must be 36 and 1");
  EXPECT_EQ(ids[0], -9);
}

TEST(KnownFailures, E5_LengthsAroundPages) {
  Case c = random_case(5, 9, 257, 4, 32, 60);
  c.ke = {257, 1, 63, 64, 65, 127, 128, 129, 0};
  for (const std::int64_t page_size : {16, 32, 64, 128, 256})
    expect_exact_in_pages({c}, fast_ways(), {.page_size = page_size});
}

TEST(KnownFailures, E8_TableNarrowerThanTheNominalMaximum) {
  // Lengths beyond the table are cut off at its end and counted, without a look past it.
  Case c = random_case(8, 3, 2 * kPage, 4, 32, 20);
  const Problem contiguous = c.problem();
  PagedProblem paged({&contiguous, 1}, 1);
  const std::vector<std::int32_t> lengths = {2 * kPage + 1, 131072, 100};
  paged.problem().ke = dense_view<const void>(lengths.data(), DType::i32, {3});
  c.ke = lengths;
  const auto expected = expected_rows(c.problem());
  for (const Options& options : many_ways()) {
    Stats stats;
    EXPECT_TRUE(exact(paged.problem(), expected, options, &stats));
    EXPECT_EQ(stats.clamped_rows, 2);
  }
  expect_exact_on_gpu(paged.problem());
}

TEST(KnownFailures, E10_APageListedTwice) {
  // Positions are different keys of equal score; their slots are the same, and may be returned twice.
  Case c = explicit_scores(scores_of(150, [](int i) { return static_cast<float>(i % kPage); }), 150);
  const Problem contiguous = c.problem();
  PagedProblem paged({&contiguous, 1}, 1);
  paged.table()[1] = paged.table()[0];
  const auto expected = expected_rows(contiguous);
  for (Options options : fast_ways()) {
    options.index_space = IndexSpace::slot;
    EXPECT_TRUE(exact(paged.problem(), expected, options));
  }
  expect_exact_on_gpu(paged.problem());
  Options slots;
  slots.index_space = IndexSpace::slot;
  const auto rows = select(paged.problem(), slots);
  EXPECT_EQ(std::ranges::count(rows[0].ids, paged.slot_of(0, 5)), 2);
}

TEST(KnownFailures, E11_TablesWithMoreColumnsAndWiderRows) {
  const std::vector<Case> cases = {random_case(1, 2, 300, 4, 32, 40), random_case(2, 2, 190, 4, 32, 40),
                                   random_case(3, 2, 65, 4, 32, 40)};
  PagedProblem paged(problems_of(cases), 3, {.extra_columns = 6});
  // A slice of a wider table, its rows in reverse.
  const TensorView narrow = paged.problem().block_table;
  const std::int64_t columns = narrow.shape[1], pitch = 2 * columns + 5;
  std::vector<std::int32_t> wide(static_cast<std::size_t>(3 * pitch), 12345678);
  for (std::int64_t r = 0; r < 3; ++r) {
    for (std::int64_t m = 0; m < columns; ++m)
      wide[static_cast<std::size_t>((2 - r) * pitch + 3 + 2 * m)] = *narrow.at<std::int32_t>(r, m);
  }
  TensorView& table = paged.problem().block_table;
  table.data = wide.data() + 2 * pitch + 3;
  table.stride = {-pitch, 2};
  const auto expected = expected_of(cases);
  for (const Options& options : many_ways()) EXPECT_TRUE(exact(paged.problem(), expected, options));
  expect_exact_on_gpu(paged.problem());
}

TEST(KnownFailures, LayersSideBySideInOnePool) {
  // Page p of layer l lies at (p * layers + l) * page bytes.
  const std::vector<Case> layers = {random_case(1, 3, 200, 4, 64, 30), random_case(2, 3, 200, 4, 64, 30),
                                    random_case(3, 3, 200, 4, 64, 30)};
  constexpr std::int64_t page_bytes = kPage * 68;
  const std::vector<std::int32_t> blocks = {3, 0, 2, 1};
  std::vector<std::uint8_t> pool(static_cast<std::size_t>(4 * 3 * page_bytes), 0x7F);
  const auto cache_of = [&](std::int64_t layer) {
    TensorView cache = dense_view<const void>(pool.data() + layer * page_bytes, DType::f8_e4m3, {4, kPage, 1, 68});
    cache.stride[0] = 3 * page_bytes;
    return cache;
  };
  for (std::size_t layer = 0; layer < 3; ++layer) {
    for (std::int64_t key = 0; key < 200; ++key) {
      std::uint8_t* page =
          pool.data() +
          (blocks[static_cast<std::size_t>(key / kPage)] * 3 + static_cast<std::int64_t>(layer)) * page_bytes;
      std::copy_n(layers[layer].k.begin() + key * 64, 64, page + key % kPage * 64);
      std::memcpy(page + kPage * 64 + key % kPage * 4, &layers[layer].k_scale[static_cast<std::size_t>(key)], 4);
    }
  }
  for (std::size_t layer = 0; layer < 3; ++layer) {
    Problem problem = layers[layer].problem();
    const auto expected = expected_rows(problem);
    problem.k = problem.k_scale = {};
    problem.kv_cache = cache_of(static_cast<std::int64_t>(layer));
    problem.block_table = dense_view<const void>(blocks.data(), DType::i32, {1, 4});
    const std::vector<std::int32_t> ke(3, 200);
    problem.ke = dense_view<const void>(ke.data(), DType::i32, {3});
    for (const Options& options : many_ways()) EXPECT_TRUE(exact(problem, expected, options)) << "layer " << layer;
    expect_exact_on_gpu(problem);
  }
}

TEST(KnownFailures, I2_EveryRequestHasItsOwnPages) {
  std::vector<Case> cases = {random_case(1, 2, 500, 4, 32, 40), random_case(2, 2, 500, 4, 32, 40)};
  expect_exact_in_pages(cases, many_ways());
  std::swap(cases[0].k, cases[1].k);
  std::swap(cases[0].k_scale, cases[1].k_scale);
  expect_exact_in_pages(cases, many_ways());
}

TEST(KnownFailures, I2_RowsOfRequestsInAnyOrder) {
  const std::vector<Case> cases = {random_case(1, 3, 900, 4, 32, 40), random_case(2, 1, 400, 4, 32, 40),
                                   random_case(3, 4, 700, 4, 32, 40)};
  PagedProblem paged(problems_of(cases), 3);
  const auto expected = expected_of(cases);
  const std::vector<int> order = shuffled(8, 5);
  const Problem sorted = paged.problem();
  std::vector<std::int32_t> owners, ke;
  std::vector<std::uint8_t> q;
  std::vector<float> w;
  std::vector<OracleRow> rows;
  for (const int row : order) {
    owners.push_back(*sorted.requests.at<std::int32_t>(row));
    ke.push_back(*sorted.ke.at<std::int32_t>(row));
    q.insert(q.end(), sorted.q.at<std::uint8_t>(row), sorted.q.at<std::uint8_t>(row) + 4 * 32);
    w.insert(w.end(), sorted.w.at<float>(row), sorted.w.at<float>(row) + 4);
    rows.push_back(expected[static_cast<std::size_t>(row)]);
  }
  Problem mixed = sorted;
  mixed.q.data = q.data();
  mixed.w.data = w.data();
  mixed.ke.data = ke.data();
  mixed.requests.data = owners.data();
  expect_exact_on_gpu(mixed);
  for (Options options : many_ways()) {
    EXPECT_TRUE(exact(mixed, rows, options));
    // As few requests at a time as fit.
    const auto indexer = Indexer::create(options);
    options.memory_budget = 1;
    const auto refused = Indexer::create(options)->plan(shape_of(mixed));
    ASSERT_FALSE(refused);
    options.memory_budget = std::stoll(refused.error().message.substr(refused.error().message.rfind(' ')));
    EXPECT_TRUE(exact(mixed, rows, options));
  }
}

TEST(KnownFailures, I5_GatherFromTheMiddleOfAPage) {
  const Case c = random_case(5, 1, 3 * kPage, 1, 128, 1);
  const Problem contiguous = c.problem();
  const PagedProblem paged({&contiguous, 1}, 2);
  TensorView blocks = paged.problem().block_table;  // exactly three pages
  blocks = dense_view<const void>(blocks.data, DType::i32, {3});
  for (const auto& [first, n] :
       {std::pair<std::int64_t, std::int64_t>{70, 60}, {0, 192}, {191, 1}, {63, 2}, {192, 0}}) {
    std::vector<std::uint8_t> k(static_cast<std::size_t>(n * 128 + 1), 0xA5);
    std::vector<float> scales(static_cast<std::size_t>(n + 1), -7.0F);
    ASSERT_TRUE(gather_keys(paged.problem().kv_cache, blocks, first,
                            dense_view<void>(k.data(), DType::f8_e4m3, {n, 128}),
                            dense_view<void>(scales.data(), DType::f32, {n})));
    EXPECT_TRUE(std::equal(k.begin(), k.end() - 1, c.k.begin() + first * 128));
    EXPECT_TRUE(std::equal(scales.begin(), scales.end() - 1, c.k_scale.begin() + first));
    EXPECT_EQ(k.back(), 0xA5);
    EXPECT_EQ(scales.back(), -7.0F);
  }
  const auto beyond =
      gather_keys(paged.problem().kv_cache, blocks, 140, dense_view<void>(nullptr, DType::f8_e4m3, {0, 128}),
                  dense_view<void>(nullptr, DType::f32, {0}));
  EXPECT_TRUE(beyond);
  std::vector<std::uint8_t> k(60 * 128);
  std::vector<float> scales(60);
  const auto past =
      gather_keys(paged.problem().kv_cache, blocks, 140, dense_view<void>(k.data(), DType::f8_e4m3, {60, 128}),
                  dense_view<void>(scales.data(), DType::f32, {60}));
  ASSERT_FALSE(past);
  EXPECT_EQ(past.error().message, "positions 140 to 199 are asked for; the 3 blocks hold 0 to 191");
}

TEST(KnownFailures, I7_PagedPrefillOfManyRequestsInChunks) {
  std::vector<Case> cases;
  for (std::uint64_t seed = 0; seed < 9; ++seed) {
    cases.push_back(random_case(seed, 20, 150 + 90 * static_cast<std::int64_t>(seed), 4, 32, 50));
    make_causal(cases.back());
  }
  expect_exact_in_pages(cases, fast_ways());
}

TEST(KnownFailures, I8_PagedPrefillOfALongContext) {
  Case a = explicit_scores(scores_of(33000, [](int i) { return static_cast<float>((i * 7919) % 33000); }), 300, 20);
  Case b = explicit_scores(scores_of(5000, [](int i) { return static_cast<float>((i * 31) % 4999); }), 300, 3);
  make_causal(a);
  make_causal(b);
  expect_exact_in_pages({a, b}, fast_ways());
}

TEST(KnownFailures, I_TableEntriesOfInvisibleKeysAreNeverRead) {
  // A window that has left its first pages: their entries are ids of no page.
  Case c = random_case(9, 2, 700, 4, 32, 40);
  c.ks = {200, 300};
  c.ke = {690, 700};
  const Problem contiguous = c.problem();
  PagedProblem paged({&contiguous, 1}, 1);
  const auto expected = expected_rows(contiguous);
  for (std::size_t page = 0; page < 3; ++page) paged.table()[page] = page == 1 ? -1 : 0x7FFFFFFF;
  for (const Options& options : many_ways()) EXPECT_TRUE(exact(paged.problem(), expected, options));
  expect_exact_on_gpu(paged.problem());
}

}  // namespace
}  // namespace dosa::test
