// What `explain` says of sampled keys, against plain recomputation.
#include "explain.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <gtest/gtest.h>

#include "score/oracle.hpp"
#include "support/cases.hpp"

namespace dosa::test {
namespace {

constexpr std::int32_t kEveryKey = 1 << 20;

ExplainOptions screening(Form form = Form::automatic, ScreenPrecision precision = ScreenPrecision::automatic,
                         std::int32_t row_budget = 0) {
  ExplainOptions options;
  options.run.method = Method::dosa;
  options.run.threads = 1;
  options.run.certificate = {form, row_budget, 0, precision};
  options.rows = {0};
  options.sampled_keys = kEveryKey;
  options.rounds = 1;
  return options;
}

Explanation explained(const Case& c, const ExplainOptions& options) {
  auto result = explain(c.problem(), options);
  EXPECT_TRUE(result) << result.error().message;
  return result ? std::move(*result) : Explanation{};
}

/// The explanation of row 0, which must have been looked into.
RowExplanation first_row(const Case& c, const ExplainOptions& options) {
  Explanation what = explained(c, options);
  if (what.rows.empty() || !what.rows[0].sample) {
    ADD_FAILURE() << "nothing was sampled";
    RowExplanation nothing;
    nothing.sample.emplace();
    return nothing;
  }
  return std::move(what.rows[0]);
}

Case mixed_case() { return random_case(7, 3, 3000, 16, 64, 100, {.positive = 0.4}); }

TEST(Explain, PartsOfTheSlackSumToIt) {
  const Case c = mixed_case();
  for (const Form form : {Form::base, Form::extended}) {
    for (const ScreenPrecision precision : {ScreenPrecision::f32, ScreenPrecision::automatic}) {
      for (const std::int32_t budget : {4, 8, 16}) {
        const RowExplanation row = first_row(c, screening(form, precision, budget));
        EXPECT_EQ(row.sample->keys.size(), 3000U);
        for (const SampledKey& key : row.sample->keys) {
          const double slack = static_cast<double>(key.bound) - key.score;
          ASSERT_NEAR(key.slack.total(), slack, 1e-4 * row.sample->sd);
          ASSERT_GE(slack, 0);
          ASSERT_GT(key.slack.allowances, -1e-4 * row.sample->sd);
          ASSERT_GE(key.slack.left_out, 0);
          ASSERT_GE(key.slack.aggregate, 0);
          if (precision == ScreenPrecision::f32) {
            ASSERT_EQ(key.slack.integers, 0);
          }
        }
      }
    }
  }
}

TEST(Explain, PredictedSurvivorsEqualABruteForceCount) {
  const Case c = mixed_case();
  const Problem problem = c.problem();
  const OracleRow oracle = oracle_row(problem, 0, ReferenceScorer::cpu, Order::score, IndexSpace::absolute);
  for (const Form form : {Form::base, Form::extended}) {
    ExplainOptions options = screening(form, ScreenPrecision::f32, 8);
    options.run.certificate.aggregates = 1;
    const RowExplanation row = first_row(c, options);
    EXPECT_EQ(row.report.tau, oracle.scores.back());
    std::int64_t winners = 0, survivors = 0;
    double mean_slack = 0;
    for (const SampledKey& key : row.sample->keys) {
      const std::span q(c.q.data(), 16 * 64);
      ASSERT_EQ(key.score, reference_score(ReferenceScorer::cpu, q, std::span(c.w).first(16),
                                           std::span(c.k).subspan(static_cast<std::size_t>(key.key) * 64, 64),
                                           c.k_scale[static_cast<std::size_t>(key.key)]));
      winners += key.score >= row.report.tau ? 1 : 0;
      survivors += key.bound >= row.report.tau ? 1 : 0;
      mean_slack += (static_cast<double>(key.bound) - key.score) / 3000 / row.sample->sd;
    }
    EXPECT_EQ(winners, 100);
    EXPECT_GT(survivors, winners);
    EXPECT_LT(survivors, 3000);
    EXPECT_NEAR(row.sample->survivors * 3000, static_cast<double>(survivors), 1e-6);
    EXPECT_NEAR(row.sample->all.total(), mean_slack, 1e-4);
    // The planner predicts from dots alone; a key whose bound equals tau but for rounding may fall on either side.
    ASSERT_EQ(row.sample->budgets.size(), 4U);
    EXPECT_EQ(row.sample->budgets[1].budget, 8);
    EXPECT_EQ(row.sample->budgets[1].form, form);
    EXPECT_NEAR(row.sample->budgets[1].survivors * 3000, static_cast<double>(survivors), 1.5);
    EXPECT_LE(row.sample->budgets[3].survivors, row.sample->budgets[0].survivors);
  }
}

TEST(Explain, MarginsAreQuantilesOfTauMinusScore) {
  std::vector<float> scores(1001);
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i);
  const RowExplanation row = first_row(explicit_scores(scores, 101), screening());
  EXPECT_EQ(row.report.tau, 900);
  const double sd = row.sample->sd;
  EXPECT_NEAR(sd, std::sqrt((1001.0 * 1001 - 1) / 12), 1e-6);
  for (std::size_t i = 0; i < kMarginQuantiles.size(); ++i) {
    EXPECT_NEAR(row.sample->margins[i] * sd, 900 - 1000 * (1 - kMarginQuantiles[i]), 1e-6);
  }
  EXPECT_EQ(row.positive, 1);
  EXPECT_EQ(row.negative, 1);
  EXPECT_EQ(row.zero, 0);
}

TEST(Explain, SeedsHaveADeficit) {
  const Case c = mixed_case();
  ExplainOptions options = screening();
  EXPECT_FALSE(first_row(c, options).seeded);
  EXPECT_EQ(first_row(c, options).deficit, 0);
  options.run.seeds = SeedPolicy::nearest_spread;
  const RowExplanation row = first_row(c, options);
  EXPECT_TRUE(row.seeded);
  EXPECT_EQ(row.report.seeds, 200);
  EXPECT_GT(row.deficit, 0);
  EXPECT_FLOAT_EQ(static_cast<float>(row.report.seed_tau + row.deficit), row.report.tau);
}

TEST(Explain, CountsWork) {
  const Case c = mixed_case();
  ExplainOptions options = screening();
  options.rows = {0, 1, 2};
  const Explanation what = explained(c, options);
  double mean = 0;
  for (const RowExplanation& row : what.rows) mean += row.measured_work / 3;  // all see every key
  EXPECT_NEAR(what.measured_work, mean, 1e-9);
  EXPECT_GT(what.seconds, 0);
  EXPECT_GT(what.dense_seconds, 0);
  EXPECT_EQ(what.budgets.size(), 4U);
  options.run.method = Method::automatic;
  options.run.min_context = 5000;
  const Explanation full = explained(c, options);
  EXPECT_EQ(full.measured_work, 1);
  EXPECT_EQ(full.predicted_work, 1);
  EXPECT_EQ(full.rows[0].report.path, Path::full_context);
  EXPECT_TRUE(full.rows[0].sample) << "what screening would have done";
}

TEST(Explain, FewQueriesAreNotSplitByKeys) {
  Case c = random_case(3, 1, 40000, 8, 32, 50);
  ExplainOptions options = screening();
  options.run.threads = 4;
  const Explanation what = explained(c, options);
  EXPECT_EQ(what.plan.key_parts, 1);
  EXPECT_EQ(what.rows.at(0).report.survivors, what.stats.survivors);
}

TEST(Explain, RowsWithoutACertificate) {
  Case c = mixed_case();
  c.ke = {3000, 50, 0};
  c.w[0] = std::numeric_limits<float>::quiet_NaN();
  ExplainOptions options = screening();
  options.rows = {0, 1, 2};
  const Explanation what = explained(c, options);
  EXPECT_EQ(what.rows[0].report.path, Path::full_exempt);
  EXPECT_EQ(what.rows[1].report.path, Path::short_row);
  EXPECT_EQ(what.rows[2].report.path, Path::empty);
  for (const RowExplanation& row : what.rows) EXPECT_FALSE(row.sample);
  EXPECT_TRUE(audit(what.rows).passed());
  EXPECT_EQ(audit(what.rows).keys, 0);
}

TEST(Explain, RefusesWhatItCannotDo) {
  const Case c = mixed_case();
  const auto code = [&](const ExplainOptions& options) {
    const auto result = explain(c.problem(), options);
    return result ? ErrorCode{} : result.error().code;
  };
  ExplainOptions options = screening();
  options.rows = {3};
  EXPECT_EQ(code(options), ErrorCode::invalid_argument);
  options = screening();
  options.run.method = Method::fused;
  EXPECT_EQ(code(options), ErrorCode::invalid_argument);
  options = screening();
  options.run.backend = Backend::cuda;
  EXPECT_EQ(code(options), ErrorCode::unsupported_device);
  options = screening();
  options.run.certificate.row_budget = 65;
  EXPECT_EQ(code(options), ErrorCode::invalid_argument);
}

/// Every key the same and each head twice: omitted heads lean on their twins and leave no residual, every score equals
/// tau, and a bound has nothing to spare but its allowances.
Case tight_case() {
  Case c = random_case(2, 40, 200, 16, 128, 100, {.positive = 1});
  for (std::int64_t i = 1; i < c.nk; ++i) std::copy_n(c.k.begin(), c.dim, c.k.begin() + i * c.dim);
  std::ranges::fill(c.k_scale, 1.0F);
  for (std::int64_t j = 0; j < c.nq; ++j) {
    const auto heads = c.q.begin() + j * c.heads * c.dim;
    std::copy_n(heads, 8 * c.dim, heads + 8 * c.dim);
    for (std::int64_t h = 0; h < 16; ++h) {
      float& w = c.w[static_cast<std::size_t>(j * 16 + h)];
      w = (h < 8 ? 10.0F : 0.1F) / (1.0F + w);
    }
  }
  return c;
}

TEST(Explain, AuditFindsMissingAllowances) {
  for (const Form form : {Form::base, Form::extended}) {
    ExplainOptions options = screening(form, ScreenPrecision::f32, 9);
    options.rows.resize(40);
    std::iota(options.rows.begin(), options.rows.end(), 0);
    const Case c = tight_case();
    const Audit sound = audit(explained(c, options).rows);
    EXPECT_TRUE(sound.passed());
    EXPECT_EQ(sound.keys, 40 * 200);
    EXPECT_EQ(sound.rejections, 0) << "every key ties with the K-th";
    EXPECT_GE(sound.smallest_slack, 0);

    options.allowances.scale = 0;
    const Audit broken = audit(explained(c, options).rows, 5);
    EXPECT_FALSE(broken.passed());
    EXPECT_GT(broken.bounds_below_score, 0);
    EXPECT_GT(broken.winners_rejected, 0);
    EXPECT_LT(broken.smallest_slack, 0);
    ASSERT_EQ(broken.closest.size(), 5U);
    EXPECT_LT(broken.closest[0].bound, broken.closest[0].tau);
    EXPECT_GE(broken.closest[0].score, broken.closest[0].tau) << "violations first";
  }
}

TEST(Explain, AuditListsTheClosestCalls) {
  const Case c = mixed_case();
  const Audit found = audit(explained(c, screening()).rows, 4);
  EXPECT_TRUE(found.passed());
  EXPECT_EQ(found.keys, 3000);
  EXPECT_GT(found.rejections, 4);
  ASSERT_EQ(found.closest.size(), 4U);
  for (const Rejection& rejection : found.closest) {
    EXPECT_LE(found.smallest_gap, static_cast<double>(rejection.tau) - rejection.bound);
    EXPECT_LT(rejection.score, rejection.tau);
  }
}

TEST(Explain, WholeSpeedIsAmdahls) {
  EXPECT_DOUBLE_EQ(whole_speed(0, 5), 1);
  EXPECT_DOUBLE_EQ(whole_speed(1, 5), 5);
  EXPECT_DOUBLE_EQ(whole_speed(0.5, 2), 4.0 / 3);
}

}  // namespace
}  // namespace dosa::test
