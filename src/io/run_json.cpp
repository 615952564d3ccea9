#include "io/run_json.hpp"

#include <vector>

#include "io/names.hpp"

namespace dosa {
namespace {

JsonObject json_of(const SlackParts& slack) {
  JsonObject json;
  json.add("projection", slack.projection)
      .add("left_out", slack.left_out)
      .add("aggregate", slack.aggregate)
      .add("allowances", slack.allowances)
      .add("integers", slack.integers)
      .add("total", slack.total());
  return json;
}

std::vector<JsonObject> json_of(std::span<const BudgetPrediction> budgets) {
  std::vector<JsonObject> list;
  for (const BudgetPrediction& budget : budgets) {
    list.emplace_back()
        .add("row_budget", budget.budget)
        .add("form", name_in(kForms, budget.form))
        .add("precision", name_in(kPrecisions, budget.precision))
        .add("survivors", budget.survivors)
        .add("work", budget.work);
  }
  return list;
}

JsonObject json_of(const RowExplanation& row) {
  const RowReport& report = row.report;
  JsonObject json;
  json.add("row", row.row)
      .add("visible", report.visible)
      .add("positive_heads", row.positive)
      .add("negative_heads", row.negative)
      .add("zero_heads", row.zero)
      .add("path", name_in(kPaths, report.path))
      .add("form", name_in(kForms, report.form))
      .add("precision", name_in(kPrecisions, report.precision))
      .add("bound_rows", report.bound_rows)
      .add("retained", report.retained)
      .add("survivors", report.survivors)
      .add("refined", report.refined)
      .add("seeds", report.seeds)
      .add("tau", static_cast<double>(report.tau))
      .add("deficit", row.deficit)
      .add("predicted_work", static_cast<double>(report.predicted_work))
      .add("measured_work", row.measured_work);
  if (!row.sample) return json;
  const std::vector<JsonObject> budgets = json_of(row.sample->budgets);
  JsonObject sample;
  sample.add("keys", static_cast<std::int64_t>(row.sample->keys.size()))
      .add("exempt", row.sample->exempt)
      .add("sd", row.sample->sd)
      .add("deficit_sd", row.deficit / row.sample->sd)
      .add("survivors", row.sample->survivors)
      .add("slack_near_tau_sd", json_of(row.sample->near_tau))
      .add("slack_sd", json_of(row.sample->all))
      .add("margins_sd", std::span<const double>(row.sample->margins))
      .add("budgets", std::span<const JsonObject>(budgets));
  json.add("sample", sample);
  return json;
}

}  // namespace

JsonObject json_of(const ProblemShape& shape, std::size_t steps) {
  JsonObject json;
  json.add("nq", shape.nq).add("nk", shape.nk).add("heads", shape.heads).add("dim", shape.dim).add("topk", shape.topk);
  if (shape.page_size > 0) {
    json.add("steps", static_cast<std::int64_t>(steps)).add("requests", shape.requests).add("page_size", shape.page_size);
  }
  return json;
}

JsonObject json_of(const Stats& stats) {
  JsonObject path;
  path.add("empty", stats.path.empty)
      .add("short_rows", stats.path.short_rows)
      .add("dosa", stats.path.dosa)
      .add("full", stats.path.full)
      .add("full_context", stats.path.full_context)
      .add("full_loose", stats.path.full_loose)
      .add("full_exempt", stats.path.full_exempt);
  JsonObject seconds;
  seconds.add("seed", stats.seconds_seed)
      .add("certify", stats.seconds_certify)
      .add("screen", stats.seconds_screen)
      .add("refine", stats.seconds_refine)
      .add("select", stats.seconds_select)
      .add("score", stats.seconds_score);
  JsonObject json;
  json.add("rows", stats.rows)
      .add("clamped_rows", stats.clamped_rows)
      .add("path", path)
      .add("visible", stats.visible)
      .add("seeds", stats.seeds)
      .add("screened", stats.screened)
      .add("survivors", stats.survivors)
      .add("refined", stats.refined)
      .add("full", stats.full)
      .add("exempt", stats.exempt)
      .add("bound_rows", stats.bound_rows)
      .add("compactions", stats.compactions)
      .add("predicted_work", stats.predicted_work)
      .add("planned_rows", stats.planned_rows)
      .add("thread_seconds", seconds);
  return json;
}

JsonObject json_of(const Audit& audit) {
  std::vector<JsonObject> closest;
  for (const Rejection& r : audit.closest) {
    closest.emplace_back()
        .add("row", r.row)
        .add("key", r.key)
        .add("score", static_cast<double>(r.score))
        .add("bound", static_cast<double>(r.bound))
        .add("tau", static_cast<double>(r.tau));
  }
  JsonObject json;
  json.add("passed", audit.passed())
      .add("keys", audit.keys)
      .add("rejections", audit.rejections)
      .add("bounds_below_score", audit.bounds_below_score)
      .add("winners_rejected", audit.winners_rejected)
      .add("smallest_slack", audit.smallest_slack)
      .add("smallest_gap", audit.smallest_gap)
      .add("closest", std::span<const JsonObject>(closest));
  return json;
}

void add_explanation(JsonObject& line, const Explanation& explanation, double indexer_share) {
  const Plan& plan = explanation.plan;
  std::vector<JsonObject> rows;
  for (const RowExplanation& row : explanation.rows) rows.push_back(json_of(row));
  const std::vector<JsonObject> budgets = json_of(explanation.budgets);
  line.add("shape", json_of(plan.shape))
      .add("method", name_in(kMethods, plan.options.method))
      .add("implementation", plan.implementation)
      .add("threads", plan.threads)
      .add("plan", plan.describe())
      .add("stats", json_of(explanation.stats))
      .add("seconds", explanation.seconds)
      .add("dense_seconds", explanation.dense_seconds)
      .add("predicted_work", explanation.predicted_work)
      .add("measured_work", explanation.measured_work)
      .add("indexer_share", indexer_share)
      .add("whole_predicted", whole_speed(indexer_share, 1 / explanation.predicted_work))
      .add("whole_measured", whole_speed(indexer_share, explanation.speed()))
      .add("margin_quantiles", std::span<const double>(kMarginQuantiles))
      .add("budgets", std::span<const JsonObject>(budgets))
      .add("rows", std::span<const JsonObject>(rows));
}

}  // namespace dosa
