#include "explain.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <tuple>

#include <fmt/format.h>

#include "backend/backend.hpp"
#include "base/carve.hpp"
#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/fpenv.hpp"
#include "base/numeric.hpp"
#include "certificate/choose.hpp"
#include "certificate/slack.hpp"
#include "score/reference.hpp"
#include "seed/seed.hpp"

namespace dosa {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kNearTau = 16;    // of so many sampled keys, one is near tau
constexpr int kBudgetStep = 4;  // between the row budgets that are predicted

// ---- the run -----------------------------------------------------------------------------------------------------

class Contender {
 public:
  static Result<Contender> create(const Problem& problem, const Options& options) {
    auto indexer = Indexer::create(options);
    if (!indexer) return tl::unexpected(indexer.error());
    auto plan = indexer->plan(shape_of(problem));
    if (!plan) return tl::unexpected(plan.error());
    return Contender(std::move(*indexer), std::move(*plan));
  }

  Result<void> run(const Problem& problem) {
    const auto start = std::chrono::steady_clock::now();
    auto done = indexer_.run(plan_, problem, selection(), workspace(), reports_);
    seconds_.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    if (!done) return tl::unexpected(done.error());
    stats_ = *done;
    return {};
  }

  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }
  [[nodiscard]] std::span<const RowReport> reports() const noexcept { return reports_; }

  [[nodiscard]] double median_seconds() const {
    std::vector<double> sorted = seconds_;
    std::ranges::sort(sorted);
    return sorted[sorted.size() / 2];
  }

  [[nodiscard]] bool selected_the_same_as(const Contender& other) const {
    const std::size_t bytes = scores_.size() * sizeof(float);
    return ids_ == other.ids_ && (bytes == 0 || std::memcmp(scores_.data(), other.scores_.data(), bytes) == 0);
  }

 private:
  Contender(Indexer indexer, Plan plan)
      : indexer_(std::move(indexer)),
        plan_(std::move(plan)),
        ids_(static_cast<std::size_t>(plan_.shape.nq * plan_.shape.topk)),
        scores_(ids_.size()),
        reports_(static_cast<std::size_t>(plan_.shape.nq)),
        memory_(plan_.workspace_bytes + Carver::alignment) {}

  [[nodiscard]] Selection selection() {
    const std::int64_t nq = plan_.shape.nq, k = plan_.shape.topk;
    return {dense_view<void>(ids_.data(), DType::i32, {nq, k}), dense_view<void>(scores_.data(), DType::f32, {nq, k})};
  }
  [[nodiscard]] Workspace workspace() {
    void* data = memory_.data();
    std::size_t space = memory_.size();
    return {std::align(Carver::alignment, plan_.workspace_bytes, data, space), plan_.workspace_bytes};
  }

  Indexer indexer_;
  Plan plan_;
  std::vector<std::int32_t> ids_;
  std::vector<float> scores_;
  std::vector<RowReport> reports_;
  std::vector<std::byte> memory_;
  std::vector<double> seconds_;
  Stats stats_;
};

// Where threads split keys, reports tell of one part only; so queries are split.
Result<Options> split_queries(const Problem& problem, Options options) {
  auto indexer = Indexer::create(options);
  if (!indexer) return tl::unexpected(indexer.error());
  auto plan = indexer->plan(shape_of(problem));
  if (!plan) return tl::unexpected(plan.error());
  if (plan->key_parts > 1) options.threads = std::max(1, plan->threads / plan->key_parts);
  return options;
}

std::optional<Error> check(const Problem& problem, const ExplainOptions& options) {
  if (options.run.method != Method::automatic && options.run.method != Method::dosa) {
    return Error{ErrorCode::invalid_argument, "method is one that never screens; explain takes auto and dosa"};
  }
  if (options.run.backend != Backend::cpu) {
    return Error{ErrorCode::unsupported_device,
                 "backend is cuda; explain reads the reports that the cpu backend makes"};
  }
  for (const std::int64_t row : options.rows) {
    if (row >= 0 && row < problem.q.shape[0]) continue;
    return Error{ErrorCode::invalid_argument, fmt::format("row is {}; there are {}", row, problem.q.shape[0])};
  }
  if (options.sampled_keys < 1 || options.rounds < 1) {
    return Error{ErrorCode::invalid_argument, "sampled_keys and rounds must be at least 1"};
  }
  return std::nullopt;
}

// ---- work --------------------------------------------------------------------------------------------------------

bool screened(const RowReport& report) noexcept { return report.path == Path::dosa; }

// Work of one row in units of its full scoring.
double work_of(const RowReport& report, const PriceList& prices) {
  if (report.visible == 0) return 0;
  const WorkPrices& price = report.precision == ScreenPrecision::i8 ? prices.i8 : prices.f32;
  const int multiple = prices.row_multiple;
  const int rows = (report.bound_rows + multiple - 1) / multiple * multiple;
  const double every_key = screened(report) ? rows * price.row + price.fixed : 1;
  const auto gathered = static_cast<double>(report.seeds + report.refined);
  return every_key + gathered / static_cast<double>(report.visible) * price.survivor;
}

void sum_work(std::span<const RowReport> reports, const PriceList& prices, Explanation& out) {
  double visible = 0, predicted = 0, measured = 0;
  for (const RowReport& report : reports) {
    const auto keys = static_cast<double>(report.visible);
    visible += keys;
    predicted += keys * (screened(report) ? static_cast<double>(report.predicted_work) : 1.0);
    measured += keys * work_of(report, prices);
  }
  if (visible == 0) return;
  out.predicted_work = predicted / visible;
  out.measured_work = measured / visible;
}

// ---- one query and its sampled keys ------------------------------------------------------------------------------

// A norm in units of sqrt(dim), rounded up; `least` is the smallest that a vector but zero may have.
float norm_summary(double square, int dim, double least) {
  if (square == 0) return 0;
  const double norm = std::max(std::sqrt(square), least);
  return round_up(norm / std::sqrt(static_cast<double>(dim)) * (1 + 0x1p-50));
}

void decode(std::span<const std::uint8_t> bytes, std::vector<float>& out) {
  for (const std::uint8_t byte : bytes) out.push_back(kE4m3Table[byte]);
}

// The f32 chain of the reference score: products of two E4M3 values are exact, so that an FMA would give the same bits.
float dot(std::span<const float> a, std::span<const float> b) {
  float sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

class Sampler {
 public:
  Sampler(const Problem& problem, std::int64_t row, VisibleRange visible, std::int32_t wanted)
      : heads_(static_cast<int>(problem.q.shape[1])), dim_(static_cast<int>(problem.q.shape[2])) {
    load_query(problem, row);
    const KeyRows keys(problem, request_of(problem, row));
    const std::int64_t count = std::min<std::int64_t>(wanted, visible.size());
    const QueryScorer score(ReferenceScorer::cpu, q_bytes_, w_);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t key = visible.begin + (2 * i + 1) * visible.size() / (2 * count);
      load_key(keys, static_cast<std::int32_t>(key), score);
    }
    measure();
  }

  [[nodiscard]] int size() const noexcept { return static_cast<int>(ids_.size()); }
  [[nodiscard]] std::int64_t exempt() const noexcept { return exempt_; }
  [[nodiscard]] std::span<const float> scores() const noexcept { return scores_; }
  [[nodiscard]] const std::vector<float>& w() const noexcept { return w_; }

  [[nodiscard]] SampledQuery query(float tau) const {
    SampledQuery out;
    out.query = heads();
    out.dots = dots();
    out.ranking = rank_heads(out.query, out.dots);
    out.alpha = alpha_;
    out.rho_e = rho_e_;
    out.tau = tau;
    return out;
  }

  // Bounds of every sampled key by the definitions that kernels reproduce, and where they come from. Empty: no
  // certificate.
  [[nodiscard]] std::vector<SampledKey> bound(const SampledQuery& sample, const CertificatePlan& plan,
                                              const Allowances& allowances) const {
    std::vector<float> aux(static_cast<std::size_t>(kMaxAggregates * dim_));
    const Certificate plain =
        build_certificate(sample.query, sample.ranking, plan.choice, sample.dots, aux, Allowances{0});
    const Certificate certificate =
        build_certificate(sample.query, sample.ranking, plan.choice, sample.dots, aux, allowances);
    if (certificate.exempt) return {};
    const std::vector<float> rows = rows_of(certificate, aux);
    const bool integer = plan.precision == ScreenPrecision::i8;
    IntegerCertificate rounded;
    std::vector<std::int8_t> integer_rows(static_cast<std::size_t>(kMaxBoundRows * dim_));
    if (integer) rounded = make_integer(certificate, sample.query, aux, integer_rows, allowances);
    if (rounded.exempt) return {};

    std::vector<SampledKey> out(ids_.size());
    std::vector<float> x(static_cast<std::size_t>(heads_));
    for (std::size_t i = 0; i < ids_.size(); ++i) {
      for (std::size_t h = 0; h < x.size(); ++h) x[h] = dots_[h * ids_.size() + i];
      const float u = bound_reference(certificate, rows, row(keys_, i), rho_[i]);
      const float final_u = integer ? bound_reference(rounded, integer_rows, row(keys8_, i), rho_[i], rho_e_[i]) : u;
      const Slack slack = decompose_slack(plain, sample.query, x, rho_[i], u);
      const double alpha = alpha_[i];
      out[i] = {ids_[i],
                scores_[i],
                alpha_[i] * final_u,
                {alpha * slack.projection, alpha * slack.left_out, alpha * slack.aggregate, alpha * slack.allowances,
                 alpha * (static_cast<double>(final_u) - static_cast<double>(u))}};
    }
    return out;
  }

 private:
  template <typename T>
  [[nodiscard]] std::span<const T> row(const std::vector<T>& rows, std::size_t i) const {
    return std::span(rows).subspan(i * static_cast<std::size_t>(dim_), static_cast<std::size_t>(dim_));
  }

  void load_query(const Problem& problem, std::int64_t query) {
    for (int h = 0; h < heads_; ++h) {
      for (int d = 0; d < dim_; ++d) q_bytes_.push_back(*problem.q.at<std::uint8_t>(query, h, d));
      w_.push_back(*problem.w.at<float>(query, h));
    }
    decode(q_bytes_, q_);
    const auto heads = static_cast<std::size_t>(heads_);
    for (std::size_t h = 0; h < heads; ++h) {
      for (std::size_t l = 0; l < heads; ++l) gram_.push_back(dot(row(q_, h), row(q_, l)));
    }
  }

  void load_key(const KeyRows& keys, std::int32_t key, const QueryScorer& score) {
    const float alpha = keys.scale(key);
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(dim_));
    keys.copy(key, bytes);
    if (std::ranges::any_of(bytes, is_nan_e4m3) || !(alpha >= 0.0F) || std::isinf(alpha)) {
      ++exempt_;
      return;
    }
    double square = 0, square_e = 0;
    for (const std::uint8_t byte : bytes) {
      const double value = kE4m3Table[byte];
      keys8_.push_back(quarter_e4m3(byte));
      const double rest = value - 4.0 * keys8_.back();
      square += value * value;
      square_e += rest * rest;
    }
    decode(bytes, keys_);
    ids_.push_back(key);
    alpha_.push_back(alpha);
    rho_.push_back(norm_summary(square, dim_, 0x1p-6));
    rho_e_.push_back(norm_summary(square_e, dim_, 0));
    scores_.push_back(score(bytes, alpha));
  }

  // Dots, and the quarter of the keys that scores best.
  void measure() {
    for (std::size_t h = 0; h < static_cast<std::size_t>(heads_); ++h) {
      for (std::size_t i = 0; i < ids_.size(); ++i) dots_.push_back(dot(row(q_, h), row(keys_, i)));
    }
    focus_.resize(ids_.size());
    std::iota(focus_.begin(), focus_.end(), 0);
    const auto code = [&](std::int32_t i) { return order_code(scores_[static_cast<std::size_t>(i)]); };
    const std::size_t quarter = (focus_.size() + 3) / 4;
    if (quarter > 0)
      std::ranges::nth_element(focus_, focus_.begin() + static_cast<std::ptrdiff_t>(quarter - 1), {}, code);
    focus_.resize(quarter);
  }

  [[nodiscard]] QueryHeads heads() const {
    return {.heads = heads_, .dim = dim_, .q = q_, .w = w_, .gram = gram_, .gram_error = gamma_n(dim_)};
  }
  [[nodiscard]] PanelDots dots() const {
    return {.keys = size(), .stride = size(), .x = dots_.data(), .focus = focus_, .rho = rho_};
  }

  [[nodiscard]] std::vector<float> rows_of(const Certificate& certificate, std::span<const float> aux) const {
    std::vector<float> rows;
    for (int j = 0; j < certificate.retained; ++j) {
      const auto head = row(q_, static_cast<std::size_t>(certificate.head[static_cast<std::size_t>(j)]));
      rows.insert(rows.end(), head.begin(), head.end());
    }
    rows.insert(rows.end(), aux.begin(), aux.begin() + (certificate.rows - certificate.retained) * dim_);
    return rows;
  }

  int heads_, dim_;
  std::int64_t exempt_ = 0;
  std::vector<std::uint8_t> q_bytes_;                // [heads, dim]
  std::vector<float> q_, w_, gram_;                  // [heads, dim], [heads], [heads, heads]
  std::vector<std::int32_t> ids_;                    // [n]
  std::vector<float> keys_;                          // [n, dim]
  std::vector<std::int8_t> keys8_;                   // [n, dim]
  std::vector<float> alpha_, rho_, rho_e_, scores_;  // [n]
  std::vector<float> dots_;                          // [heads, n]
  std::vector<std::int32_t> focus_;
};

// ---- statistics --------------------------------------------------------------------------------------------------

double standard_deviation(std::span<const float> values) {
  double count = 0, mean = 0, square = 0;
  for (const float value : values) {
    if (!std::isfinite(value)) continue;
    count += 1;
    const double step = value - mean;
    mean += step / count;
    square += step * (value - mean);
  }
  return count > 0 ? std::sqrt(square / count) : 0;
}

double quantile(std::span<const double> sorted, double q) {
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (at - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

// Mean slack of some keys in units of `unit`.
SlackParts mean_slack(std::span<const SampledKey> keys, double unit) {
  SlackParts mean;
  const double share = 1 / (static_cast<double>(keys.size()) * unit);
  for (const SampledKey& key : keys) {
    mean.projection += key.slack.projection * share;
    mean.left_out += key.slack.left_out * share;
    mean.aggregate += key.slack.aggregate * share;
    mean.allowances += key.slack.allowances * share;
    mean.integers += key.slack.integers * share;
  }
  return mean;
}

// Everything that follows from the sampled bounds and scores of a row whose K-th best score is `tau`.
void summarise(RowSample& out, float tau) {
  const double unit = out.sd > 0 ? out.sd : std::numeric_limits<double>::quiet_NaN();
  std::vector<SampledKey> nearest;
  std::vector<double> margins;
  std::int64_t survivors = out.exempt;
  for (const SampledKey& key : out.keys) {
    survivors += key.bound < tau ? 0 : 1;
    if (!std::isfinite(key.score) || !std::isfinite(key.slack.total())) continue;
    nearest.push_back(key);
    margins.push_back((static_cast<double>(tau) - key.score) / unit);
  }
  out.survivors =
      static_cast<double>(survivors) / static_cast<double>(out.keys.size() + static_cast<std::size_t>(out.exempt));
  if (nearest.empty()) return;
  out.all = mean_slack(nearest, unit);
  std::ranges::sort(nearest, {},
                    [tau](const SampledKey& key) { return std::abs(static_cast<double>(tau) - key.score); });
  out.near_tau = mean_slack(std::span(nearest).first((nearest.size() + kNearTau - 1) / kNearTau), unit);
  std::ranges::sort(margins);
  for (std::size_t i = 0; i < kMarginQuantiles.size(); ++i) out.margins[i] = quantile(margins, kMarginQuantiles[i]);
}

// ---- rows --------------------------------------------------------------------------------------------------------

CertificatePlan plan_of(const RowReport& report) {
  const int aggregates = report.form == Form::base ? report.bound_rows - report.retained : 1;
  return {{report.form, report.retained, aggregates}, report.precision};
}

struct PlanWorkspace {
  std::vector<float> u, aux;
  std::vector<std::int8_t> rows;

  PlanWorkspace(int keys, int dim)
      : u(static_cast<std::size_t>(keys)),
        aux(static_cast<std::size_t>(kMaxAggregates * dim)),
        rows(static_cast<std::size_t>(kMaxBoundRows * dim)) {}

  [[nodiscard]] PredictionScratch scratch() { return {.u = u, .aux = aux, .integer_rows = rows}; }
};

constexpr CertificatePlan starting_plan(int rows) { return {{Form::extended, rows - 1, 1}, ScreenPrecision::i8}; }

std::vector<BudgetPrediction> predict_budgets(const SampledQuery& sample, const CertificateOptions& wanted,
                                              const PriceList& prices, PlanWorkspace& workspace) {
  std::vector<BudgetPrediction> out;
  const int most = std::min(kMaxBoundRows, (sample.query.heads + kBudgetStep - 1) / kBudgetStep * kBudgetStep);
  for (int budget = kBudgetStep; budget <= most; budget += kBudgetStep) {
    CertificateOptions fixed = wanted;
    fixed.row_budget = budget;
    const ChosenCertificate chosen =
        choose_certificate({&sample, 1}, fixed, prices, starting_plan(budget), workspace.scratch());
    out.push_back({budget, chosen.plan.choice.form, chosen.plan.precision, chosen.work.survivors, chosen.work.total});
  }
  return out;
}

std::optional<RowSample> sample_row(const Problem& problem, const RowExplanation& row, VisibleRange visible,
                                    const ExplainOptions& options, const PriceList& prices) {
  const RowReport& report = row.report;
  if (visible.size() <= problem.topk || report.path == Path::full_exempt || report.tau == -kInfinity)
    return std::nullopt;
  const Sampler sampler(problem, row.row, visible, options.sampled_keys);
  if (sampler.size() == 0) return std::nullopt;
  const SampledQuery sample = sampler.query(report.tau);
  PlanWorkspace workspace(sampler.size(), sample.query.dim);
  const CertificateOptions& wanted = options.run.certificate;
  const CertificatePlan plan =
      screened(report) ? plan_of(report)
                       : choose_certificate({&sample, 1}, wanted, prices, starting_plan(16), workspace.scratch()).plan;
  RowSample out;
  out.keys = sampler.bound(sample, plan, options.allowances);
  if (out.keys.empty()) return std::nullopt;
  out.sd = standard_deviation(sampler.scores());
  out.exempt = sampler.exempt();
  summarise(out, report.tau);
  out.budgets = predict_budgets(sample, wanted, prices, workspace);
  return out;
}

RowExplanation explain_row(const Problem& problem, std::int64_t row, const RowReport& report,
                           const ExplainOptions& options, const PriceList& prices) {
  RowExplanation out;
  out.row = row;
  out.report = report;
  for (std::int64_t h = 0; h < problem.w.shape[1]; ++h) {
    const float w = *problem.w.at<float>(row, h);
    out.positive += w > 0.0F ? 1 : 0;
    out.negative += w < 0.0F ? 1 : 0;
    out.zero += w == 0.0F ? 1 : 0;
  }
  out.measured_work = work_of(report, prices);
  out.seeded = report.seeds > 0;
  if (out.seeded) out.deficit = static_cast<double>(report.tau) - report.seed_tau;
  out.sample = sample_row(problem, out, visible_range(problem, row), options, prices);
  return out;
}

// Mean of the rows' predictions, weighted by visible keys, under the form and precision of most of them.
std::vector<BudgetPrediction> mean_budgets(std::span<const RowExplanation> rows) {
  std::vector<BudgetPrediction> mean;
  std::vector<std::array<int, 8>> votes;  // by form and precision
  double visible = 0;
  const auto vote_of = [](const BudgetPrediction& p) {
    return static_cast<std::size_t>(p.form) * 2 + (p.precision == ScreenPrecision::i8 ? 1 : 0);
  };
  for (const RowExplanation& row : rows) {
    if (!row.sample) continue;
    const auto keys = static_cast<double>(row.report.visible);
    visible += keys;
    mean.resize(row.sample->budgets.size());
    votes.resize(mean.size());
    for (std::size_t i = 0; i < mean.size(); ++i) {
      const BudgetPrediction& one = row.sample->budgets[i];
      mean[i].budget = one.budget;
      mean[i].survivors += keys * one.survivors;
      mean[i].work += keys * one.work;
      const std::size_t vote = vote_of(one);
      ++votes[i][vote];
      if (votes[i][vote] == std::ranges::max(votes[i]))
        std::tie(mean[i].form, mean[i].precision) = std::tie(one.form, one.precision);
    }
  }
  for (BudgetPrediction& budget : mean) {
    budget.survivors /= visible;
    budget.work /= visible;
  }
  return mean;
}

}  // namespace

Result<Explanation> explain(const Problem& problem, const ExplainOptions& options) {
  if (const auto error = check(problem, options)) return tl::unexpected(*error);
  const auto run_options = split_queries(problem, options.run);
  if (!run_options) return tl::unexpected(run_options.error());
  Options dense_options = *run_options;
  dense_options.method = Method::dense;
  auto run = Contender::create(problem, *run_options);
  if (!run) return tl::unexpected(run.error());
  auto dense = Contender::create(problem, dense_options);
  if (!dense) return tl::unexpected(dense.error());
  for (std::int32_t round = 0; round < options.rounds; ++round) {
    for (Contender* contender : {&*dense, &*run}) {
      if (auto done = contender->run(problem); !done) return tl::unexpected(done.error());
    }
  }
  if (!run->selected_the_same_as(*dense)) {
    return fail(ErrorCode::verification_failed, "the selection differs from that of full scoring");
  }

  const ScopedFloatEnvironment environment;
  Explanation out;
  out.plan = run->plan();
  out.stats = run->stats();
  out.seconds = run->median_seconds();
  out.dense_seconds = dense->median_seconds();
  const PriceList prices = cpu_prices(out.plan.shape, out.plan.implementation);
  sum_work(run->reports(), prices, out);
  for (const std::int64_t row : options.rows) {
    out.rows.push_back(explain_row(problem, row, run->reports()[static_cast<std::size_t>(row)], options, prices));
  }
  out.budgets = mean_budgets(out.rows);
  return out;
}

Audit audit(std::span<const RowExplanation> rows, std::size_t listed) {
  Audit out;
  out.smallest_slack = out.smallest_gap = std::numeric_limits<double>::infinity();
  std::vector<std::pair<double, Rejection>> found;
  for (const RowExplanation& row : rows) {
    if (!row.sample) continue;
    const float tau = row.report.tau;
    for (const SampledKey& key : row.sample->keys) {
      ++out.keys;
      if (!(key.score <= key.bound)) ++out.bounds_below_score;
      const double slack = static_cast<double>(key.bound) - key.score;
      out.smallest_slack = std::min(out.smallest_slack, std::isnan(slack) ? 0 : slack);  // inf - inf
      if (!(key.bound < tau)) continue;
      ++out.rejections;
      const double gap = static_cast<double>(tau) - key.bound;
      out.smallest_gap = std::min(out.smallest_gap, gap);
      const bool wrong = !(key.score < tau);
      out.winners_rejected += wrong ? 1 : 0;
      found.emplace_back(wrong ? -kInfinity : gap, Rejection{row.row, key.key, key.bound, key.score, tau});
    }
  }
  const std::size_t count = std::min(listed, found.size());
  std::ranges::partial_sort(found, found.begin() + static_cast<std::ptrdiff_t>(count), {},
                            [](const auto& rejection) { return rejection.first; });
  for (std::size_t i = 0; i < count; ++i) out.closest.push_back(found[i].second);
  return out;
}

}  // namespace dosa
