// Decoding: draft tokens, drained slots, lengths that change under one plan, and what is carried from step to step.
// C: short rows. G: what of scheduling a CPU can meet. H: draft tokens. K: keys that move.
#include "dosa/decode.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>

#include "dosa/pages.hpp"
#include "known_failures/support.hpp"
#include "support/gpu.hpp"
#include "support/paged.hpp"
#include "support/sparse.hpp"

namespace dosa::test {
namespace {

constexpr std::int64_t kDim = 32;

/// Requests of `keys` keys and `next_n` queries each, with a length per draft token.
struct Batch {
  std::int64_t next_n;
  std::vector<Case> cases;
  std::vector<std::int32_t> lengths;

  Batch(std::int64_t requests, std::int64_t draft_tokens, std::int64_t keys, std::int32_t topk) : next_n(draft_tokens) {
    for (std::int64_t r = 0; r < requests; ++r) {
      cases.push_back(random_case(static_cast<std::uint64_t>(100 + r), draft_tokens, keys, 4, kDim, topk));
    }
    lengths.assign(static_cast<std::size_t>(requests * draft_tokens), static_cast<std::int32_t>(keys));
  }

  [[nodiscard]] std::vector<OracleRow> expected() const {
    std::vector<OracleRow> all;
    for (std::size_t r = 0; r < cases.size(); ++r) {
      Case c = cases[r];
      const auto first = lengths.begin() + static_cast<std::ptrdiff_t>(r) * next_n;
      c.ke.assign(first, first + next_n);
      for (OracleRow& row : expected_rows(c.problem())) all.push_back(std::move(row));
    }
    return all;
  }
};

/// A batch in pages, as the verb of decode.hpp makes a Problem of it.
class Step {
 public:
  explicit Step(const Batch& batch)
      : lengths_(batch.lengths),
        contiguous_([&] {
          std::vector<Problem> problems;
          for (const Case& c : batch.cases) problems.push_back(c.problem());
          return problems;
        }()),
        paged_(contiguous_, 7) {
    const Problem& p = paged_.problem();
    const auto requests = static_cast<std::int64_t>(batch.cases.size());
    TensorView q = p.q;
    q.rank = 4;
    q.shape = {requests, batch.next_n, p.q.shape[1], p.q.shape[2]};
    q.stride = {batch.next_n * p.q.stride[0], p.q.stride[0], p.q.stride[1], p.q.stride[2]};
    const auto made =
        decode_problem({q, p.w, p.kv_cache, p.block_table,
                        dense_view<const void>(lengths_.data(), DType::i32, {requests, batch.next_n}), p.topk});
    EXPECT_TRUE(made);
    problem_ = *made;
  }
  [[nodiscard]] const Problem& problem() const { return problem_; }
  [[nodiscard]] std::vector<std::int32_t>& lengths() { return lengths_; }

 private:
  std::vector<std::int32_t> lengths_;
  std::vector<Problem> contiguous_;
  PagedProblem paged_;
  Problem problem_;
};

void expect_exact_batch(const Batch& batch, const std::vector<Options>& ways) {
  const Step step(batch);
  const auto expected = batch.expected();
  for (Options options : ways) {
    for (const IndexSpace space : {IndexSpace::absolute, IndexSpace::slot}) {
      options.index_space = space;
      EXPECT_TRUE(exact(step.problem(), expected, options));
    }
  }
  expect_exact_on_gpu(step.problem());
}

TEST(KnownFailures, C1_DrainedSlotsOfABatch) {
  Batch batch(3, 2, 600, 40);
  batch.lengths = {599, 600, -1, 0, 0, 1};
  expect_exact_batch(batch, many_ways());
}

TEST(KnownFailures, C2_MoreDraftTokensThanTokensInPages) {
  Batch batch(2, 4, 90, 8);
  batch.lengths = {-1, 0, 1, 2, 87, 88, 89, 90};
  expect_exact_batch(batch, many_ways());
}

TEST(KnownFailures, C3_AllLengthsZeroInBatches) {
  for (const std::int64_t requests : {1, 32, 64}) {
    Batch batch(requests, 1, 70, 16);
    std::ranges::fill(batch.lengths, 0);
    expect_exact_batch(batch, fast_ways());
    batch.lengths.back() = 66;
    expect_exact_batch(batch, fast_ways());
  }
}

TEST(KnownFailures, C9_PaddingStaysMinusOneInPages) {
  Batch batch(2, 4, 100, 60);
  batch.lengths = {3, 4, 5, 6, 59, 60, 61, 0};
  const Step step(batch);
  for (const IndexSpace space : {IndexSpace::absolute, IndexSpace::relative, IndexSpace::slot}) {
    for (Options options : many_ways()) {
      options.index_space = space;
      const auto rows = select(step.problem(), options);
      for (std::size_t row = 0; row < rows.size(); ++row) {
        const auto valid = std::ranges::count_if(rows[row].ids, [](std::int32_t id) { return id >= 0; });
        EXPECT_EQ(valid, std::min(batch.lengths[row], 60));
        EXPECT_EQ(std::ranges::count(rows[row].ids, -1), 60 - valid);
      }
    }
  }
}

TEST(KnownFailures, G4_APlanOfABatchMeetsAnIdleOne) {
  Batch batch(8, 1, 500, 30);
  Step step(batch);
  const auto expected = batch.expected();
  for (const Options& options : fast_ways()) {
    auto indexer = Indexer::create(options);
    const auto plan = indexer->plan(shape_of(step.problem()));
    std::vector<std::int32_t> ids(8 * 30);
    const auto run = [&] {
      std::ranges::fill(ids, 0x7FFFFFFF);
      return indexer->run(*plan, step.problem(), {dense_view<void>(ids.data(), DType::i32, {8, 30}), {}}).has_value();
    };
    // G9: lengths are read when it runs.
    for (int round = 0; round < 2; ++round) {
      std::ranges::copy(batch.lengths, step.lengths().begin());
      ASSERT_TRUE(run());
      for (std::size_t row = 0; row < 8; ++row) {
        EXPECT_TRUE(std::equal(expected[row].ids.begin(), expected[row].ids.end(),
                               ids.begin() + static_cast<std::ptrdiff_t>(row) * 30));
      }
      std::ranges::fill(step.lengths(), 0);
      ASSERT_TRUE(run());
      EXPECT_EQ(std::ranges::count(ids, -1), 8 * 30);
    }
  }
}

TEST(KnownFailures, G10_TimeAndMemoryFollowTheRealLength) {
  // Room for a million keys a request, of which there are 2100.
  Batch batch(8, 1, 2100, 300);
  const Step step(batch);
  constexpr std::int64_t columns = 1 << 14;
  std::vector<std::int32_t> table(8 * columns, -1);
  for (std::int64_t r = 0; r < 8; ++r) {
    for (std::int64_t m = 0; m < step.problem().block_table.shape[1]; ++m) {
      table[static_cast<std::size_t>(r * columns + m)] = *step.problem().block_table.at<std::int32_t>(r, m);
    }
  }
  Problem wide = step.problem();
  wide.block_table = dense_view<const void>(table.data(), DType::i32, {8, columns});
  const auto expected = batch.expected();
  for (const Options& options : fast_ways()) {
    auto indexer = Indexer::create(options);
    const auto plan = indexer->plan(shape_of(wide));
    ASSERT_TRUE(plan) << plan.error().message;
    const SparseMemory memory(plan->workspace_bytes);
    std::vector<std::int32_t> ids(8 * 300);
    const auto start = std::chrono::steady_clock::now();
    const auto stats = indexer->run(*plan, wide, {dense_view<void>(ids.data(), DType::i32, {8, 300}), {}},
                                    {memory.as<void>(), plan->workspace_bytes});
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    ASSERT_TRUE(stats);
    EXPECT_LT(seconds.count(), 1.0);  // takes milliseconds
    EXPECT_LE(stats->screened + stats->full + stats->seeds, 2 * 8 * 2100);
    for (std::size_t row = 0; row < 8; ++row) {
      EXPECT_TRUE(std::equal(expected[row].ids.begin(), expected[row].ids.end(),
                             ids.begin() + static_cast<std::ptrdiff_t>(row) * 300));
    }
  }
}

TEST(KnownFailures, H1_AnyNumberOfDraftTokens) {
  for (std::int64_t next_n = 1; next_n <= 8; ++next_n) {
    for (const std::int64_t requests : {1, 2, 5}) {
      Batch batch(requests, next_n, 300, 24);
      for (std::size_t n = 0; n < batch.lengths.size(); ++n) {
        batch.lengths[n] = static_cast<std::int32_t>(300 - next_n + 1) +
                           static_cast<std::int32_t>(n) % static_cast<std::int32_t>(next_n);
      }
      expect_exact_batch(batch, fast_ways());
    }
  }
}

TEST(KnownFailures, H2_RequestsWithOneAndFourDraftTokens) {
  // Rows in a list, with the request of each: one row of a plain request, and three requests of four.
  std::vector<Case> cases;
  std::vector<Problem> problems;
  for (std::uint64_t r = 0; r < 4; ++r) {
    cases.push_back(random_case(r, r == 0 ? 1 : 4, 400 + 10 * static_cast<std::int64_t>(r), 4, kDim, 50));
    make_causal(cases.back());
  }
  std::vector<OracleRow> expected;
  for (const Case& c : cases) {
    problems.push_back(c.problem());
    for (OracleRow& row : expected_rows(problems.back())) expected.push_back(std::move(row));
  }
  const PagedProblem paged(problems, 2);
  for (const Options& options : many_ways()) EXPECT_TRUE(exact(paged.problem(), expected, options));
  expect_exact_on_gpu(paged.problem());
}

TEST(KnownFailures, H3_DraftTokensSeeTheirKeysInEveryShard) {
  Batch batch(1, 4, 300, 40);
  batch.lengths = {254, 255, 256, 257};
  const Step step(batch);
  const auto expected = batch.expected();
  std::vector<std::vector<std::pair<float, std::int32_t>>> merged(4);
  for (std::int32_t shard = 0; shard < 5; ++shard) {  // of 64 keys
    Problem part = step.problem();
    std::vector<std::int32_t> ks(4, shard * 64), ke;
    for (const std::int32_t length : batch.lengths) ke.push_back(std::min(length, (shard + 1) * 64));
    part.ks = dense_view<const void>(ks.data(), DType::i32, {4});
    part.ke = dense_view<const void>(ke.data(), DType::i32, {1, 4});
    const auto rows = select(part, Options{});
    for (std::size_t row = 0; row < 4; ++row) {
      for (std::size_t n = 0; n < 40 && rows[row].ids[n] >= 0; ++n)
        merged[row].emplace_back(-rows[row].scores[n], rows[row].ids[n]);
    }
  }
  for (std::size_t row = 0; row < 4; ++row) {
    std::ranges::sort(merged[row]);
    for (std::size_t n = 0; n < 40; ++n) EXPECT_EQ(merged[row][n].second, expected[row].ids[n]);
  }
}

TEST(KnownFailures, H4_AnOutputWidthOf2051) {
  for (const int keys : {2051, 2052, 8192}) {
    Batch batch(1, 1, keys, 2051);
    expect_exact_batch(batch, fast_ways());
  }
}

TEST(KnownFailures, H5_DraftTokensPastTheEndOfTheContext) {
  Batch batch(2, 3, 128, 20);  // two full pages: the table ends there
  batch.lengths = {128, 129, 130, 126, 127, 128};
  const Step step(batch);
  const auto expected = batch.expected();
  for (const Options& options : many_ways()) {
    Stats stats;
    EXPECT_TRUE(exact(step.problem(), expected, options, &stats));
    EXPECT_EQ(stats.clamped_rows, 2);
  }
  expect_exact_on_gpu(step.problem());
}

TEST(KnownFailures, K4_PagesMovedToAnotherPoolSelectTheSame) {
  Batch batch(1, 2, 200, 30);
  const Step step(batch);
  const auto expected = batch.expected();
  constexpr std::int64_t page_size = 64, pages = 9, width = kDim + 4;
  std::vector<std::uint8_t> pool(pages * page_size * width, 0x7F);
  const std::array<std::int32_t, 4> blocks = {8, 1, 5, 3};
  std::vector<std::int32_t> from, to;
  for (std::int32_t i = 0; i < 200; ++i) {
    from.push_back(*step.problem().block_table.at<std::int32_t>(0, i / page_size) * 64 + i % 64);
    to.push_back(blocks[static_cast<std::size_t>(i / page_size)] * 64 + i % 64);
  }
  const auto view = [](const auto& slots) { return dense_view<const void>(slots.data(), DType::i32, {200}); };
  ASSERT_TRUE(move_keys(step.problem().kv_cache, view(from),
                        dense_view<void>(pool.data(), DType::f8_e4m3, {pages, page_size, 1, width}), view(to)));
  Problem moved = step.problem();
  moved.kv_cache = dense_view<const void>(pool.data(), DType::f8_e4m3, {pages, page_size, 1, width});
  moved.block_table = dense_view<const void>(blocks.data(), DType::i32, {1, 4});
  for (const Options& options : many_ways()) EXPECT_TRUE(exact(moved, expected, options));
  expect_exact_on_gpu(moved);
}

TEST(KnownFailures, K5_TheFirstKeyThatIsDropped) {
  Batch batch(1, 3, 100, 64);
  batch.lengths = {63, 64, 65};
  expect_exact_batch(batch, many_ways());
  const auto rows = batch.expected();
  EXPECT_EQ(std::ranges::count(rows[2].ids, -1), 0);
}

}  // namespace
}  // namespace dosa::test
