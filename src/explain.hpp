// Why a selection took what it took: counters of a real run beside slack, margins and predicted work on sampled keys.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "certificate/certificate.hpp"
#include "dosa/indexer.hpp"

namespace dosa {

struct ExplainOptions {
  Options run;                       ///< method automatic or dosa, backend cpu
  std::vector<std::int64_t> rows;    ///< queries to look into, each in [0, nq)
  std::int32_t sampled_keys = 4096;  ///< per query, evenly spread over what it sees
  std::int32_t rounds = 3;           ///< timed runs, with full scoring in between; medians are kept
  Allowances allowances = {};        ///< of the certificates that are looked into; anything else is for tests
};

/// What a bound gives away: U - s in the units of the score, or means of it in standard deviations of the scores.
struct SlackParts {
  double projection = 0;  ///< omitted positive heads
  double left_out = 0;    ///< omitted negative heads in no aggregate
  double aggregate = 0;   ///< omitted negative heads in one
  double allowances = 0;  ///< arithmetic errors, bounded
  double integers = 0;    ///< rows and keys rounded to integers, bounded; 0 where the screen is f32

  [[nodiscard]] double total() const noexcept { return projection + left_out + aggregate + allowances + integers; }
};

/// One sampled key, in plain scalar code. A key is rejected if bound < tau.
struct SampledKey {
  std::int32_t key = 0;
  float score = 0;  ///< s, the reference score
  float bound = 0;  ///< U
  SlackParts slack;
};

/// What a row budget would cost, relative to full scoring.
struct BudgetPrediction {
  std::int32_t budget = 0;
  Form form = Form::automatic;  ///< the cheapest one; of several queries, that of most
  ScreenPrecision precision = ScreenPrecision::automatic;
  double survivors = 0;  ///< share of the keys, with the true tau
  double work = 0;
};

inline constexpr std::array kMarginQuantiles{0.05, 0.25, 0.5, 0.75, 0.95};

/// What was learnt from a query's sampled keys. "sd": standard deviations of the sampled scores, NaN if they are all
/// equal.
struct RowSample {
  double sd = 0;            ///< in units of the score
  std::int64_t exempt = 0;  ///< keys that always survive and are left out of everything else here
  std::vector<SampledKey> keys;
  SlackParts near_tau;  ///< mean over the sixteenth of the keys whose scores lie nearest to tau; sd
  SlackParts all;       ///< mean over all; sd
  std::array<double, kMarginQuantiles.size()> margins{};  ///< quantiles of tau - s; sd
  double survivors = 0;                                   ///< share with bound >= the true tau
  std::vector<BudgetPrediction> budgets;                  ///< 4, 8, 12, ... heads
};

struct RowExplanation {
  std::int64_t row = 0;
  RowReport report;                                   ///< of the run
  std::int32_t positive = 0, negative = 0, zero = 0;  ///< heads by the sign of their weight; NaN counts as neither
  double measured_work = 0;  ///< from the run's counters and the planner's prices, relative to full scoring
  bool seeded = false;       ///< seeds were scored before any bound was compared
  double deficit = 0;        ///< true tau - tau of the seeds, units of the score; 0 without seeds
  /// Absent where no certificate is possible: at most topk visible keys, or exempt. A row that was scored in full is
  /// looked into with the certificate that would have been cheapest.
  std::optional<RowSample> sample;
};

struct Explanation {
  Plan plan;
  Stats stats;
  std::vector<RowExplanation> rows;
  double seconds = 0, dense_seconds = 0;  ///< wall time, medians
  // Relative to full scoring, over all rows of the run.
  double predicted_work = 0;              ///< by the run's own plans; 1 for rows scored in full
  double measured_work = 0;               ///< from its counters
  std::vector<BudgetPrediction> budgets;  ///< mean of the sampled rows, by visible keys

  [[nodiscard]] double speed() const noexcept { return dense_seconds / seconds; }
};

/// Speed of the whole where a part that takes `share` of the time becomes `speed` times as fast (Amdahl).
constexpr double whole_speed(double share, double speed) noexcept { return 1 / (1 - share + share / speed); }

/// Selects with options.run and in full, in turns, and looks into the given rows. Certificates are made again, for each
/// row alone, from the form, heads and precision of the run; its group of neighbouring queries took statistics from
/// fewer keys. Errors: those of Indexer, invalid_argument (method, rows), unsupported_device (backend),
/// verification_failed (the two selections differ: a bug of ours). Cost: the runs, and some 0.1 s a row.
Result<Explanation> explain(const Problem& problem, const ExplainOptions& options);

/// A sampled key that its bound rejects.
struct Rejection {
  std::int64_t row = 0;
  std::int32_t key = 0;
  float bound = 0, score = 0, tau = 0;
};

/// The two promises, checked on every sampled key.
struct Audit {
  std::int64_t keys = 0;
  std::int64_t rejections = 0;
  std::int64_t bounds_below_score = 0;  ///< must be 0: U < s
  std::int64_t winners_rejected = 0;    ///< must be 0: U < tau, but not s < tau
  double smallest_slack = 0;            ///< least U - s; +inf without keys
  double smallest_gap = 0;              ///< least tau - U of a rejection; +inf without any
  std::vector<Rejection> closest;       ///< rejections with the least gaps, violations first

  [[nodiscard]] bool passed() const noexcept { return bounds_below_score == 0 && winners_rejected == 0; }
};

Audit audit(std::span<const RowExplanation> rows, std::size_t listed = 8);

}  // namespace dosa
