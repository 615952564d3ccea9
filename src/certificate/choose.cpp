#include "certificate/choose.hpp"

#include <algorithm>
#include <limits>

namespace dosa {
namespace {

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

int auxiliary_rows(const CertificatePlan& plan) {
  return plan.choice.form == Form::base ? plan.choice.aggregates : 1;
}

CertificatePlan with_rows(CertificatePlan plan, int rows) {
  plan.choice.retained = std::max(0, rows - auxiliary_rows(plan));
  return plan;
}

class Climb {
 public:
  Climb(std::span<const SampledQuery> samples, const CertificateOptions& wanted, const PriceList& prices,
        const PredictionScratch& scratch)
      : samples_(samples), wanted_(wanted), prices_(prices), scratch_(scratch) {}

  // Tries a plan; true if it is the cheapest so far.
  bool consider(const CertificatePlan& plan) {
    PredictedWork mean;
    const double share = 1.0 / static_cast<double>(samples_.size());
    for (const SampledQuery& sample : samples_) {
      const PredictedWork work = predict_work(sample, plan, prices_, scratch_);
      mean.rows += work.rows * share;
      mean.survivors += work.survivors * share;
      mean.total += work.total * share;
    }
    if (!(mean.total < best_.work.total)) return false;
    best_ = {plan, mean};
    return true;
  }

  void climb_rows() {
    if (wanted_.row_budget > 0) return;
    for (const int step : {prices_.row_multiple, -prices_.row_multiple}) {
      bool moved = false;
      while (true) {
        const int rows = rows_of(best_.plan) + step;
        if (rows < prices_.row_multiple || rows > most_rows() || !consider(with_rows(best_.plan, rows))) break;
        moved = true;
      }
      if (moved) return;
    }
  }

  // The other shapes at the best budget.
  void try_forms() {
    const int rows = rows_of(best_.plan);
    const CertificatePlan found = best_.plan;
    const auto allowed = [&](Form form) { return wanted_.form == Form::automatic || wanted_.form == form; };
    if (allowed(Form::extended) && found.choice.form != Form::extended) {
      consider(with_rows({{Form::extended, 0, 1, wanted_.ablation}, found.precision}, rows));
    }
    for (int groups = 1; allowed(Form::base) && groups <= std::min(kMaxAggregates, rows); ++groups) {
      if (wanted_.aggregates > 0 && groups != wanted_.aggregates) continue;
      if (found.choice.form == Form::base && found.choice.aggregates == groups) continue;
      const bool better = consider(with_rows({{Form::base, 0, groups, wanted_.ablation}, found.precision}, rows));
      if (!better && groups >= 2) break;
    }
  }

  [[nodiscard]] int rows_of(const CertificatePlan& plan) const {
    return round_up(plan.choice.retained + auxiliary_rows(plan), prices_.row_multiple);
  }
  [[nodiscard]] int most_rows() const {
    return std::min(kMaxBoundRows, round_up(samples_.front().query.heads, prices_.row_multiple));
  }
  [[nodiscard]] const ChosenCertificate& best() const { return best_; }

 private:
  std::span<const SampledQuery> samples_;
  const CertificateOptions& wanted_;
  const PriceList& prices_;
  const PredictionScratch& scratch_;
  ChosenCertificate best_{{}, {0, 1, std::numeric_limits<double>::infinity()}};
};

}  // namespace

PredictedWork predict_work(const SampledQuery& sample, const CertificatePlan& plan, const PriceList& prices,
                           const PredictionScratch& scratch) {
  const bool integer = plan.precision == ScreenPrecision::i8;
  const WorkPrices& price = integer ? prices.i8 : prices.f32;
  const Certificate certificate = build_certificate(sample.query, sample.ranking, plan.choice, sample.dots, scratch.aux);
  const PredictedWork hopeless{0, 1, price.fixed + price.survivor};
  if (certificate.exempt) return hopeless;
  int rows = certificate.rows;
  if (integer) {
    const IntegerCertificate rounded = make_integer(certificate, sample.query, scratch.aux, scratch.integer_rows);
    if (rounded.exempt) return hopeless;
    predict_bounds(certificate, rounded, sample.dots, sample.dots.rho, sample.rho_e, scratch.u);
    rows = rounded.rows;
  } else {
    predict_bounds(certificate, sample.dots, sample.dots.rho, scratch.u);
  }
  int survivors = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(sample.dots.keys); ++i) {
    survivors += sample.alpha[i] * scratch.u[i] < sample.tau ? 0 : 1;
  }
  PredictedWork work;
  work.rows = round_up(rows, prices.row_multiple);
  work.survivors = static_cast<double>(survivors) / sample.dots.keys;
  work.total = work.rows * price.row + work.survivors * price.survivor + price.fixed;
  return work;
}

ChosenCertificate choose_certificate(std::span<const SampledQuery> samples, const CertificateOptions& wanted,
                                     const PriceList& prices, const CertificatePlan& start, const PredictionScratch& scratch) {
  Climb climb(samples, wanted, prices, scratch);
  CertificatePlan first = start;
  if (wanted.precision != ScreenPrecision::automatic) first.precision = wanted.precision;
  if (!prices.has_i8) first.precision = ScreenPrecision::f32;
  if (wanted.form != Form::automatic) first.choice.form = wanted.form;
  if (wanted.aggregates > 0) first.choice.aggregates = wanted.aggregates;
  first.choice.ablation = wanted.ablation;
  if (wanted.row_budget > 0) first = with_rows(first, wanted.row_budget);
  climb.consider(first);
  climb.climb_rows();
  if (wanted.form != Form::absolute) {
    const CertificatePlan before = climb.best().plan;
    climb.try_forms();
    if (climb.best().plan != before) climb.climb_rows();
  }
  // Rounding to integers can cost more than it saves: keys of small magnitude.
  if (wanted.precision == ScreenPrecision::automatic && climb.best().plan.precision == ScreenPrecision::i8 &&
      climb.best().work.total > 0.5) {
    CertificatePlan exact = climb.best().plan;
    exact.precision = ScreenPrecision::f32;
    if (climb.consider(exact)) climb.climb_rows();
  }
  return climb.best();
}

}  // namespace dosa
