// Why a selection took what it took. The library finds it out (src/explain.hpp); this prints it.
#include "explain.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <fmt/format.h>

#include "commands.hpp"
#include "console.hpp"
#include "io/names.hpp"
#include "io/run_json.hpp"
#include "run.hpp"

namespace dosa::cli {
namespace {

/// One case and what was learnt about it.
struct Explained {
  const ExplainArgs& args;
  const std::string& trace;
  Explanation what;
  Audit audit;
};

// ---- text --------------------------------------------------------------------------------------------------------

std::string_view reason(Path path) {
  switch (path) {
    case Path::empty: return "no keys";
    case Path::short_row: return "all win";
    case Path::dosa: return "screened";
    case Path::full: return "in full";
    case Path::full_context: return "in full: few keys";
    case Path::full_loose: return "in full: loose";
    case Path::full_exempt: return "in full: not finite";
  }
  return "?";
}

std::string percent(double share) { return fmt::format("{:.2f} %", 100 * share); }

double share_of(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

/// "-" where there is no such number.
std::string number(double value, int digits = 3) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "-";
}

std::string form_text(const RowReport& report) {
  if (report.path != Path::dosa) return "-";
  return fmt::format("{}/{}", name_in(kForms, report.form), name_in(kPrecisions, report.precision));
}

void print_queries(const Explained& e) {
  fmt::print(
      "\nQueries. A certificate bounds every score from a few rows, retained heads and sums of the others; a key "
      "whose\n"
      "bound stays below tau is rejected, the others survive and are scored (refined) as long as tau lies below "
      "them.\n");
  fmt::print("  {:>6} {:>8} {:>13} {:19} {:13} {:>5} {:>8} {:>9} {:>9}\n", "query", "visible", "heads +/-/0", "path",
             "form", "rows", "retained", "survive", "refined");
  for (const RowExplanation& row : e.what.rows) {
    const RowReport& r = row.report;
    fmt::print("  {:>6} {:>8} {:>13} {:19} {:13} {:>5} {:>8} {:>9} {:>9}\n", row.row, r.visible,
               fmt::format("{}/{}/{}", row.positive, row.negative, row.zero), reason(r.path), form_text(r),
               r.bound_rows, r.retained, percent(share_of(r.survivors, r.visible)),
               percent(share_of(r.refined, r.visible)));
  }
  const Stats& stats = e.what.stats;
  fmt::print("  {:>6} {:>8} {:>13} {:19} {:13} {:>5} {:>8} {:>9} {:>9}\n", "all",
             stats.rows == 0 ? 0 : stats.visible / stats.rows, "",
             fmt::format("{} of {} screened", stats.path.dosa, stats.rows), "",
             number(share_of(stats.bound_rows, stats.path.dosa), 1), "",
             percent(share_of(stats.survivors, stats.visible)), percent(share_of(stats.refined, stats.visible)));
}

void print_seeds(const Explained& e) {
  if (std::ranges::none_of(e.what.rows, &RowExplanation::seeded)) {
    fmt::print(
        "\nSeeds. None: the keys with the largest bounds are scored first, and tau comes from them (deficit 0 by\n"
        "construction).\n");
    return;
  }
  fmt::print(
      "\nSeeds. Keys scored before any bound is compared give the first tau; its deficit to the true one lets keys\n"
      "survive. In units of the score, and in standard deviations (sd) of the query's scores.\n");
  fmt::print("  {:>6} {:>8} {:>12} {:>12} {:>12} {:>8}\n", "query", "seeds", "seed tau", "tau", "deficit", "in sd");
  for (const RowExplanation& row : e.what.rows) {
    if (!row.seeded) continue;
    fmt::print("  {:>6} {:>8} {:>12.5g} {:>12.5g} {:>12.4g} {:>8}\n", row.row, row.report.seeds, row.report.seed_tau,
               row.report.tau, row.deficit, row.sample ? number(row.deficit / row.sample->sd) : "-");
  }
}

void print_slack_line(std::string_view name, const SlackParts& slack, const std::string& rest) {
  fmt::print("  {:>6} {:>10} {:>9} {:>9} {:>10} {:>9} {:>7}  {}\n", name, number(slack.projection),
             number(slack.left_out), number(slack.aggregate), number(slack.allowances, 5), number(slack.integers),
             number(slack.total()), rest);
}

void print_samples(const Explained& e) {
  fmt::print(
      "\nSlack and margins. A key is rejected if its margin tau - s exceeds the slack of its bound, U - s, plus the\n"
      "deficit. All in standard deviations (sd) of the query's scores; slack is the mean over the sampled keys\n"
      "nearest to tau, by what is lost: omitted positive heads (projection), negative ones left out or summed\n"
      "(aggregate), arithmetic, rounding to integers.\n");
  fmt::print("  {:>6} {:>10} {:>9} {:>9} {:>10} {:>9} {:>7}  margins at 5, 25, 50, 75, 95 %\n", "query", "projection",
             "left out", "aggregate", "arithmetic", "integers", "slack");
  SlackParts near, all;
  double count = 0;
  const auto add = [](SlackParts& sum, const SlackParts& part) {
    sum.projection += part.projection;
    sum.left_out += part.left_out;
    sum.aggregate += part.aggregate;
    sum.allowances += part.allowances;
    sum.integers += part.integers;
  };
  for (const RowExplanation& row : e.what.rows) {
    if (!row.sample) continue;
    std::string margins;
    for (const double margin : row.sample->margins) margins += fmt::format("{:>6}", number(margin, 2));
    print_slack_line(fmt::format("{}", row.row), row.sample->near_tau, margins);
    add(near, row.sample->near_tau);
    add(all, row.sample->all);
    count += 1;
  }
  const auto mean = [&](const SlackParts& sum) {
    return SlackParts{sum.projection / count, sum.left_out / count, sum.aggregate / count, sum.allowances / count,
                      sum.integers / count};
  };
  print_slack_line("mean", mean(near), "");
  print_slack_line("any", mean(all), "mean over all sampled keys, near tau or not");
}

void print_work(const Explained& e) {
  fmt::print(
      "\nWork, relative to full scoring: what the plan expected, planning included, and what the run's counters\n"
      "come to at the same prices; a row scored in full counts 1 in all. Times hold everything, selection too.\n");
  fmt::print("  {:>6} {:>10} {:>10}\n", "query", "predicted", "measured");
  for (const RowExplanation& row : e.what.rows) {
    fmt::print("  {:>6} {:>10} {:>10}\n", row.row,
               row.report.predicted_work > 0 ? number(static_cast<double>(row.report.predicted_work)) : "-",
               number(row.measured_work));
  }
  fmt::print("  {:>6} {:>10} {:>10}\n", "all", number(e.what.predicted_work), number(e.what.measured_work));
  fmt::print("  {:>6} {:>9.2f}x {:>9.2f}x   and in time {:.2f}x: {:.1f} ms against {:.1f} ms in full, threads {}\n",
             "speed", 1 / e.what.predicted_work, 1 / e.what.measured_work, e.what.speed(), 1e3 * e.what.seconds,
             1e3 * e.what.dense_seconds, e.what.plan.threads);
}

void print_budgets(const Explained& e) {
  if (e.what.budgets.empty()) return;
  fmt::print(
      "\nOther row budgets. More rows make the bound tighter and dearer: predicted on the sampled keys with the true\n"
      "tau, each with its best form. Whole: the prefill, of which the indexer takes {:.0f} % (--share).\n",
      100 * e.args.share);
  fmt::print("  {:>6} {:13} {:>9} {:>8} {:>8} {:>8}\n", "rows", "form", "survive", "work", "speed", "whole");
  const auto cheapest = std::ranges::min_element(e.what.budgets, {}, &BudgetPrediction::work);
  for (const BudgetPrediction& budget : e.what.budgets) {
    fmt::print("  {:>6} {:13} {:>9} {:>8} {:>7.2f}x {:>7.2f}x{}\n", budget.budget,
               fmt::format("{}/{}", name_in(kForms, budget.form), name_in(kPrecisions, budget.precision)),
               percent(budget.survivors), number(budget.work), 1 / budget.work,
               whole_speed(e.args.share, 1 / budget.work), &budget == &*cheapest ? "  cheapest" : "");
  }
}

void print_whole(const Explained& e) {
  const double share = e.args.share;
  fmt::print(
      "\nWhole prefill, 1 / (1 - F + F / speed) with F = {:.2f}: {:.2f}x as predicted, {:.2f}x as measured; at most "
      "{}.\n",
      share, whole_speed(share, 1 / e.what.predicted_work), whole_speed(share, e.what.speed()),
      share < 1 ? fmt::format("{:.2f}x", 1 / (1 - share)) : "unlimited");
}

void print_audit(const Audit& audit) {
  fmt::print(
      "\nAudit. Bounds U and scores s of {} sampled keys in plain scalar code: s <= U must hold for each, and s < tau\n"
      "for each of the {} with U < tau. The closest of these:\n",
      audit.keys, audit.rejections);
  fmt::print("  {:>6} {:>9} {:>15} {:>15} {:>15} {:>11}\n", "query", "key", "s", "U", "tau", "tau - U");
  for (const Rejection& r : audit.closest) {
    fmt::print("  {:>6} {:>9} {:>15.8g} {:>15.8g} {:>15.8g} {:>11.3g}\n", r.row, r.key, r.score, r.bound, r.tau,
               static_cast<double>(r.tau) - r.bound);
  }
  fmt::print("  smallest U - s {:.3g}, smallest tau - U {:.3g}\n", audit.smallest_slack, audit.smallest_gap);
  if (audit.passed()) {
    fmt::print("  every bound holds\n");
  } else {
    fmt::print("  VIOLATED: {} bounds below the score, {} possible winners rejected; this is a bug of dosa\n",
               audit.bounds_below_score, audit.winners_rejected);
  }
}

void print_text(const Explained& e) {
  const Plan& plan = e.what.plan;
  fmt::print("{}: {}; method {}, {}, threads {}\n", case_name(e.trace), describe(plan.shape),
             name_in(kMethods, plan.options.method), plan.implementation, plan.threads);
  for (const std::string& line : describe_paths(e.what.stats.path)) fmt::print("  {}\n", line);
  print_queries(e);
  const bool sampled = std::ranges::any_of(e.what.rows, [](const auto& row) { return row.sample.has_value(); });
  if (sampled) {
    print_seeds(e);
    print_samples(e);
  }
  if (e.what.predicted_work > 0) {
    print_work(e);
    print_budgets(e);
    print_whole(e);
  }
  if (e.args.audit) print_audit(e.audit);
}

void print_json(const Explained& e) {
  JsonObject line("explain");
  line.add("case", case_name(e.trace)).add("trace", e.trace);
  add_explanation(line, e.what, e.args.share);
  if (e.args.audit) line.add("audit", json_of(e.audit));
  fmt::print("{}\n", line.line());
}

Result<int> explain_case(const std::string& trace, const Problem& problem, const ExplainArgs& args) {
  Explained e{args, trace, {}, {}};
  {
    const Progress progress("explaining " + case_name(trace));
    auto what = dosa::explain(problem, {.run = args.options, .rows = spread_rows(problem.q.shape[0], args.rows)});
    if (!what) return tl::unexpected(what.error());
    e.what = std::move(*what);
  }
  if (args.audit) e.audit = audit(e.what.rows);
  if (args.json) {
    print_json(e);
  } else {
    print_text(e);
  }
  std::fflush(stdout);
  return e.audit.passed() ? kOk : kDifference;
}

}  // namespace

Result<int> explain(const ExplainArgs& args) {
  int code = kOk;
  bool first = true;
  for (const std::string& path : args.traces) {
    auto trace = Trace::open(path);
    if (!trace) return tl::unexpected(trace.error());
    Problem problem = trace->problem(trace->steps() - 1);
    for (const std::int32_t topk : args.topk) {
      problem.topk = topk;
      if (!args.json && !first) fmt::print("\n");
      first = false;
      auto result = explain_case(path, problem, args);
      if (!result) return result;
      code = std::max(code, *result);
    }
  }
  return code;
}

}  // namespace dosa::cli
