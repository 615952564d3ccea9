// Threads: whatever they share, the answer is that of one thread. Small, because the thread sanitizer runs it.
#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "dosa/indexer.hpp"
#include "support/cases.hpp"
#include "support/check.hpp"

namespace dosa::test {
namespace {

std::vector<Options> methods_with(std::int32_t threads) {
  std::vector<Options> result;
  for (const Method method : {Method::dense, Method::fused, Method::dosa, Method::automatic}) {
    Options options;
    options.method = method;
    options.threads = threads;
    options.min_context = 1;
    result.push_back(options);
  }
  return result;
}

Stats stats_of(const Problem& problem, const Options& options) {
  const std::int64_t nq = problem.q.shape[0];
  std::vector<std::int32_t> ids(static_cast<std::size_t>(nq * problem.topk));
  auto indexer = Indexer::create(options);
  const auto plan = indexer->plan(shape_of(problem));
  return indexer->run(*plan, problem, {dense_view<void>(ids.data(), DType::i32, {nq, problem.topk}), {}, {}}).value();
}

void expect_equal_for_any_threads(const Case& c) {
  const Problem problem = c.problem();
  const auto expected = expected_rows(problem);
  for (const std::int32_t threads : {2, 3, 8}) {
    for (const Options& options : methods_with(threads)) {
      EXPECT_TRUE(exact(problem, expected, options)) << describe(options);
    }
  }
}

TEST(Threads, ShareQueries) {
  Case c = random_case(1, 70, 9000, 4, 32, 300);
  make_causal(c);
  expect_equal_for_any_threads(c);
}

TEST(Threads, ShareTheKeysOfOneQuery) { expect_equal_for_any_threads(random_case(2, 1, 70000, 4, 32, 300)); }

// Keys of one request are summarized by one worker each, before the screen or in it.
TEST(Threads, CountEveryExemptKeyOnce) {
  for (const std::int64_t nq : {1, 3, 40}) {
    Case c = random_case(6, nq, 40000, 4, 32, 300);
    for (std::int64_t i = 0; i < nq; ++i) {  // cuts depend on lengths
      c.ks.push_back(0);
      c.ke.push_back(static_cast<std::int32_t>(c.nk - nq + 1 + i));
    }
    std::int64_t expected = 0;
    for (std::int64_t i = 0; i < c.nk; i += 1 + i % 7) {
      if (i % 2 == 0) c.k_scale[static_cast<std::size_t>(i)] = i % 4 == 0 ? -1.0F : std::numeric_limits<float>::infinity();
      if (i % 2 != 0) c.k[static_cast<std::size_t>(i * c.dim + i % c.dim)] = 0x7F;
      ++expected;
    }
    const Problem problem = c.problem();
    const auto rows = expected_rows(problem);
    for (const std::int32_t threads : {1, 2, 3, 4}) {
      Options options;
      options.method = Method::dosa;
      options.threads = threads;
      EXPECT_TRUE(exact(problem, rows, options)) << describe(options);
      const Stats stats = stats_of(problem, options);
      EXPECT_EQ(stats.path.dosa, nq);
      EXPECT_EQ(stats.exempt, expected) << describe(options) << ' ' << nq;
    }
  }
}

// Each scores some of a query's witnesses, and tau is of all: K of them, counted once, whoever scored them.
TEST(Threads, ShareTheWitnessesOfOneQuery) {
  for (const std::int64_t nq : {1, 2}) {
    Case c = random_case(7, nq, 70000, 4, 32, 300);
    c.k_scale[5] = std::numeric_limits<float>::quiet_NaN();
    const auto winners = expected_rows(c.problem()).front().ids;
    for (std::size_t i = 0; i < 290; ++i) c.hints.push_back(winners[i]);
    for (const std::int32_t odd : {winners[0], winners[289], 5, -1, 70000, 69999, 0, 35000}) c.hints.push_back(odd);
    const Problem problem = c.problem();
    const auto rows = expected_rows(problem);
    for (const SeedPolicy seeds : {SeedPolicy::automatic, SeedPolicy::chain, SeedPolicy::nearest_spread}) {
      std::int64_t alone = 0;
      for (const std::int32_t threads : {1, 2, 3, 8}) {
        Options options;
        options.method = Method::dosa;
        options.threads = threads;
        options.seeds = seeds;
        EXPECT_TRUE(exact(problem, rows, options)) << describe(options);
        const Stats stats = stats_of(problem, options);
        if (threads == 1) alone = stats.seeds;
        EXPECT_GT(stats.seeds, 0);
        EXPECT_EQ(stats.seeds, alone) << describe(options);
      }
    }
  }
}

TEST(Threads, ShareRaggedRanges) {
  Case c = random_case(3, 40, 9000, 4, 32, 300);
  make_ragged(c, 3);
  expect_equal_for_any_threads(c);
}

TEST(Threads, ChainsOfWinnersStayInsideAWorker) {
  Case c = random_case(4, 70, 9000, 4, 32, 100);
  make_causal(c);
  const auto expected = expected_rows(c.problem());
  for (Options options : methods_with(3)) {
    options.seeds = SeedPolicy::chain;
    EXPECT_TRUE(exact(c.problem(), expected, options)) << describe(options);
  }
}

// The thread rule: two Indexers, two workspaces, one shared plan.
TEST(Threads, IndexersRunSideBySide) {
  Case c = random_case(5, 40, 9000, 4, 32, 300);
  make_causal(c);
  const Problem problem = c.problem();
  const auto expected = expected_rows(problem);
  std::vector<std::jthread> callers;
  for (const Options& options : methods_with(2)) {
    callers.emplace_back([&, options] {
      for (int n = 0; n < 3; ++n) EXPECT_TRUE(exact(problem, expected, options)) << describe(options);
    });
  }
}

}  // namespace
}  // namespace dosa::test
