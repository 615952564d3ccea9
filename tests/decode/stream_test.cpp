// A thousand steps of decoding against the oracle.
#include "decode/recent.hpp"
#include "dosa/indexer.hpp"
#include "support/engine.hpp"

namespace dosa::test {
namespace {

/// Decodes with `options` and compares every row of every step.
Stats expect_exact_stream(const Options& options, std::uint64_t seed, int steps) {
  Random random(seed);
  Engine engine(seed);
  auto indexer = Indexer::create(options);
  Stats total;
  std::int64_t most = 0;
  for (int n = 0; n < steps; ++n) {
    const auto next_n = static_cast<std::int64_t>(1 + random() % 4);
    for (std::int64_t r = 0; r < kRequests; ++r) {
      if (engine.length(r) + 2 * next_n + 8 > kRoom) engine.restart(r);
      engine.append(r, next_n);  // every draft token's key is written, before it is known which are accepted
    }
    const DecodeStep step = engine.step(next_n);
    const auto problem = decode_problem(step);
    EXPECT_TRUE(problem);
    const auto plan = indexer->plan(shape_of(*problem));
    EXPECT_TRUE(plan);
    const std::int64_t rows = kRequests * next_n;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * kTopk), 0x7FFFFFFF);
    std::vector<float> scores(ids.size());
    const auto stats = indexer->run(*plan, *problem,
                                    {dense_view<void>(ids.data(), DType::i32, {rows, kTopk}),
                                     dense_view<void>(scores.data(), DType::f32, {rows, kTopk}), engine.recent_view()});
    EXPECT_TRUE(stats) << stats.error().message;
    total += *stats;
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t request = row / next_n;
      const OracleRow expected = engine.expected(request, row % next_n, next_n);
      for (std::int64_t at = 0; at < kTopk; ++at) {
        const std::int32_t want = expected.ids[static_cast<std::size_t>(at)];
        const auto slot = static_cast<std::size_t>(row * kTopk + at);
        const bool equal =
            ids[slot] == (options.index_space == IndexSpace::slot ? engine.slot_of(request, want) : want) &&
            std::bit_cast<std::uint32_t>(scores[slot]) ==
                std::bit_cast<std::uint32_t>(expected.scores[static_cast<std::size_t>(at)]);
        if (equal) continue;
        ADD_FAILURE() << "step " << n << " row " << row << " slot " << at << ": id " << ids[slot] << ", expected "
                      << want;
        return total;
      }
    }
    for (std::int64_t r = 0; r < kRequests; ++r) {
      engine.grow(r, 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(next_n)));
      most = std::max(most, engine.length(r));
    }
    disturb(engine, random);
  }
  EXPECT_GT(most, steps < 1000 ? kTopk : kRoom * 9 / 10);
  return total;
}

Options with(Method method, IndexSpace space) {
  Options options;
  options.method = method;
  options.index_space = space;
  options.min_context = 1;
  options.threads = 2;
  return options;
}

TEST(DecodeStream, AThousandStepsOfDosa) {
  const Stats stats = expect_exact_stream(with(Method::dosa, IndexSpace::slot), 1, 1000);
  EXPECT_GT(stats.seeds, 0);
  EXPECT_GT(stats.screened, stats.survivors);
  EXPECT_GT(stats.path.empty, 0);
  EXPECT_GT(stats.path.short_rows, 0);
  EXPECT_GT(stats.path.dosa, 1000);
}

TEST(DecodeStream, EveryMethodAndSeedPolicy) {
  for (const Method method : {Method::automatic, Method::dense, Method::fused, Method::dosa}) {
    expect_exact_stream(with(method, IndexSpace::absolute), 2, 150);
  }
  for (const SeedPolicy seeds : {SeedPolicy::chain, SeedPolicy::nearest_spread, SeedPolicy::largest_bounds}) {
    Options options = with(Method::dosa, IndexSpace::slot);
    options.seeds = seeds;
    options.certificate.row_budget = 2;
    expect_exact_stream(options, 3, 150);
  }
}

TEST(DecodeStream, TheFirstStepNeedsNoStateAndTheSecondUsesIt) {
  Engine engine(5);
  for (std::int64_t r = 0; r < kRequests; ++r) {
    engine.append(r, 300);
    engine.grow(r, 299);
  }
  auto indexer = Indexer::create(with(Method::dosa, IndexSpace::slot));
  std::vector<std::int32_t> ids(kRequests * kTopk);
  for (int n = 0; n < 3; ++n) {
    const DecodeStep step = engine.step(1);
    const auto problem = decode_problem(step);
    const auto plan = indexer->plan(shape_of(*problem));
    const auto stats = indexer->run(
        *plan, *problem, {dense_view<void>(ids.data(), DType::i32, {kRequests, kTopk}), {}, engine.recent_view()});
    ASSERT_TRUE(stats);
    EXPECT_EQ(stats->seeds > 0, n > 0);
    for (std::int64_t r = 0; r < kRequests; ++r) {
      // The newest winners come first, as positions whatever the ids are.
      const std::vector<std::int32_t> newest = engine.expected(r, 0, 1).ids;
      EXPECT_TRUE(std::equal(newest.begin(), newest.end(), engine.recent(r).begin()));
      if (n == 2) std::ranges::fill(engine.recent(r), -1);
    }
  }
}

TEST(Recent, NewestFirstDistinctAndTheOldestFallOut) {
  std::vector<std::int32_t> recent(7, -1), scratch(9);
  const hwy::Sorter sorter;
  const auto add = [&](const std::vector<std::int32_t>& winners) { remember(winners, recent, scratch, sorter); };
  add({5, 3});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{5, 3, -1, -1, -1, -1, -1}));
  add({9, 5, 4});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{9, 5, 4, 3, -1, -1, -1}));
  add({1, 2, 3, 6});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{1, 2, 3, 6, 9, 5, 4}));
  add({7});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{7, 1, 2, 3, 6, 9, 5}));
  add({});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{7, 1, 2, 3, 6, 9, 5}));
  recent = {7, -3, std::numeric_limits<std::int32_t>::min(), 8, -1, 7, 7};  // any contents
  add({8, 2});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{8, 2, 7, 7, 7, -1, -1}));
  add({10, 11, 12, 13, 14, 15, 16, 1, 0});  // more than there is room for: the first of them
  EXPECT_EQ(recent, (std::vector<std::int32_t>{10, 11, 12, 13, 14, 15, 16}));
  std::vector<std::int32_t> none;
  remember(recent, none, scratch, sorter);
}

}  // namespace
}  // namespace dosa::test
