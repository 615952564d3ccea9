// Every exact method against the oracle, ids and score bits.
#include <algorithm>
#include <array>
#include <mutex>

#include <fmt/format.h>

#include "base/keys.hpp"
#include "commands.hpp"
#include "console.hpp"
#include "io/names.hpp"
#include "io/run_json.hpp"
#include "run.hpp"
#include "score/oracle.hpp"
#include "select/records.hpp"

namespace dosa::cli {
namespace {

/// What one method's rows were found to be.
struct Verdict {
  std::string_view method;
  std::string difference;  ///< empty: equal
  std::int64_t row = 0;
};

/// Oracle rows of one case: the expected result of rows[i] is expected[i].
struct Expected {
  std::vector<std::int64_t> rows;
  std::vector<OracleRow> expected;
};

// Rows of all steps, counted through.
std::int64_t row_count(const Steps& steps) { return steps.front().q.shape[0] * static_cast<std::int64_t>(steps.size()); }
const Problem& step_of(const Steps& steps, std::int64_t row) { return steps[static_cast<std::size_t>(row / steps.front().q.shape[0])]; }
std::int64_t row_in_step(const Steps& steps, std::int64_t row) { return row % steps.front().q.shape[0]; }

Expected ask_oracle(const Steps& steps, const VerifyArgs& args, ReferenceScorer scorer) {
  Expected result{spread_rows(row_count(steps), args.rows), {}};
  result.expected.resize(result.rows.size());
  const auto count = static_cast<std::int64_t>(result.rows.size());
  Progress progress(fmt::format("oracle ({}), row", name_in(kReferences, scorer)), count);
  for_each_index(count, args.options.threads, [&](std::int64_t i) {
    const auto slot = static_cast<std::size_t>(i);
    result.expected[slot] =
        oracle_row(step_of(steps, result.rows[slot]), row_in_step(steps, result.rows[slot]), scorer, args.options.order,
                   args.options.index_space);
    progress.advance();
  });
  return result;
}

Verdict compare(std::string_view method, const Rows& rows, const Expected& oracle) {
  for (std::size_t i = 0; i < oracle.rows.size(); ++i) {
    const std::int64_t row = oracle.rows[i];
    const OracleRow& expected = oracle.expected[i];
    if (auto difference = first_difference(rows.row_ids(row), rows.row_scores(row), expected.ids, expected.scores)) {
      return {method, std::move(*difference), row};
    }
  }
  return {method, "", 0};
}

/// The methods of the backend, against the reference that its scores are defined by. Rows that the oracle did not compute are
/// compared with the first method's.
Result<std::vector<Verdict>> verify_methods(const Steps& steps, const VerifyArgs& args) {
  std::vector<Runner> runners;
  std::vector<std::string_view> names;
  for (const auto& [name, method] : kMethods) {
    Options options = args.options;
    options.method = method;
    auto runner = Runner::create(steps, options);
    if (!runner) return tl::unexpected(runner.error());
    names.push_back(name);
    const Progress progress(fmt::format("selecting with {}", name));
    if (auto done = runner->run(); !done) return tl::unexpected(done.error());
    runners.push_back(std::move(*runner));
  }
  const Expected oracle = ask_oracle(steps, args, args.options.backend == Backend::cuda ? ReferenceScorer::sm90 : ReferenceScorer::cpu);
  std::vector<Verdict> verdicts;
  for (std::size_t i = 0; i < runners.size(); ++i) {
    const Rows& rows = runners[i].rows();
    Verdict verdict = compare(names[i], rows, oracle);
    for (std::int64_t row = 0; row < rows.nq && verdict.difference.empty(); ++row) {
      const Rows& first = runners[0].rows();
      if (auto difference =
              first_difference(rows.row_ids(row), rows.row_scores(row), first.row_ids(row), first.row_scores(row))) {
        verdict = {names[i], fmt::format("{} (from method {})", *difference, names[0]), row};
      }
    }
    verdicts.push_back(std::move(verdict));
  }
  return verdicts;
}

/// One row selected from the sm90 scores through the record buffer that every method uses, in the oracle's layout.
OracleRow select_sm90(const Problem& problem, std::int64_t row, Order order, IndexSpace space) {
  const VisibleRange visible = visible_range(problem, row);
  const KeyRows keys(problem, request_of(problem, row));
  const auto heads = static_cast<std::size_t>(problem.q.shape[1]);
  const auto dim = static_cast<std::size_t>(problem.q.shape[2]);
  const std::span q(problem.q.at<std::uint8_t>(row), heads * dim);  // a trace's tensors are dense
  const std::span w(problem.w.at<float>(row), heads);

  const auto topk = static_cast<std::size_t>(problem.topk);
  std::vector<dosa::Record> storage(2 * topk);
  RecordBuffer buffer(storage, problem.topk);
  const QueryScorer score(ReferenceScorer::sm90, q, w);
  for (std::int64_t i = visible.begin; i < visible.end; ++i) {
    buffer.push(score({keys.row(i), dim}, keys.scale(i)), static_cast<std::int32_t>(i));
  }
  buffer.compact();
  const auto records = buffer.records();
  if (order == Order::score) {
    std::ranges::sort(records);
  } else {
    std::ranges::sort(records, {}, id_of);
  }
  OracleRow result{std::vector<std::int32_t>(topk, -1),
                   std::vector<float>(topk, -std::numeric_limits<float>::infinity())};
  for (std::size_t slot = 0; slot < records.size(); ++slot) {
    result.ids[slot] = keys.id_of(id_of(records[slot]), space, visible.begin);
    result.scores[slot] = score_of(records[slot]);
  }
  return result;
}

struct Sm90Verdict {
  Verdict verdict;
  std::int64_t rows = 0;
  std::int64_t winners = 0;        ///< ids of all rows
  std::int64_t other_winners = 0;  ///< of those, not among the cpu reference's
  std::int64_t rows_that_differ = 0;
};

/// How many ids of `a` are not in `b`.
std::int64_t missing_ids(std::vector<std::int32_t> a, std::vector<std::int32_t> b) {
  std::ranges::sort(a);
  std::ranges::sort(b);
  std::vector<std::int32_t> only;
  std::ranges::set_difference(a, b, std::back_inserter(only));
  return static_cast<std::int64_t>(only.size());
}

Sm90Verdict verify_sm90(const Steps& steps, const VerifyArgs& args) {
  const Expected sm90 = ask_oracle(steps, args, ReferenceScorer::sm90);
  const Expected cpu = ask_oracle(steps, args, ReferenceScorer::cpu);
  const auto count = static_cast<std::int64_t>(sm90.rows.size());
  Sm90Verdict result{{"sm90", "", 0}, count};
  std::vector<std::string> differences(sm90.rows.size());
  Progress progress("selecting from sm90 scores, row", count);
  for_each_index(count, args.options.threads, [&](std::int64_t index) {
    const auto i = static_cast<std::size_t>(index);
    const OracleRow row = select_sm90(step_of(steps, sm90.rows[i]), row_in_step(steps, sm90.rows[i]), args.options.order, args.options.index_space);
    differences[i] = first_difference(row.ids, row.scores, sm90.expected[i].ids, sm90.expected[i].scores).value_or("");
    progress.advance();
  });
  for (std::size_t i = 0; i < sm90.rows.size(); ++i) {
    if (!differences[i].empty() && result.verdict.difference.empty()) {
      result.verdict = {"sm90", differences[i], sm90.rows[i]};
    }
    const std::int64_t other = missing_ids(sm90.expected[i].ids, cpu.expected[i].ids);
    result.winners += std::ranges::count_if(sm90.expected[i].ids, [](std::int32_t id) { return id >= 0; });
    result.other_winners += other;
    result.rows_that_differ += other > 0 ? 1 : 0;
  }
  return result;
}

JsonObject json_of(const Verdict& verdict) {
  JsonObject json;
  json.add("method", verdict.method).add("equal", verdict.difference.empty());
  if (!verdict.difference.empty()) json.add("row", verdict.row).add("difference", verdict.difference);
  return json;
}

/// What was found in one case, in words and in fields for its JSON line.
struct CaseReport {
  std::vector<Verdict> verdicts;
  std::string note;
  JsonObject fields;

  [[nodiscard]] bool equal() const {
    return std::ranges::all_of(verdicts, [](const Verdict& verdict) { return verdict.difference.empty(); });
  }
};

Result<CaseReport> check_methods(const Steps& steps, const VerifyArgs& args) {
  auto verdicts = verify_methods(steps, args);
  if (!verdicts) return tl::unexpected(verdicts.error());
  return CaseReport{std::move(*verdicts), "", {}};
}

Result<CaseReport> check_sm90(const Steps& steps, const VerifyArgs& args) {
  // Nothing is run, but the shape must be one that could be.
  if (auto runner = Runner::create(steps, args.options); !runner) return tl::unexpected(runner.error());
  const Sm90Verdict sm90 = verify_sm90(steps, args);
  CaseReport report{{sm90.verdict},
                    fmt::format("{} of {} winners, in {} of {} rows, are not the cpu reference's: the two score "
                                "differently by design",
                                sm90.other_winners, sm90.winners, sm90.rows_that_differ, sm90.rows),
                    {}};
  report.fields.add("winners", sm90.winners)
      .add("not_cpu_winners", sm90.other_winners)
      .add("rows_unlike_cpu", sm90.rows_that_differ);
  return report;
}

void print_text(const std::string& trace, const Steps& steps, std::size_t rows, const CaseReport& report) {
  fmt::print("{}: {}; {} rows against the oracle\n", case_name(trace), describe(shape_of(steps.front()), steps.size()), rows);
  for (const Verdict& verdict : report.verdicts) {
    if (verdict.difference.empty()) {
      fmt::print("  {:5}  equal, ids and score bits\n", verdict.method);
    } else {
      fmt::print("  {:5}  DIFFERS in row {}, {}\n", verdict.method, verdict.row, verdict.difference);
    }
  }
  if (!report.note.empty()) fmt::print("  {}\n", report.note);
}

void print_json(const std::string& trace, const Steps& steps, const VerifyArgs& args, std::size_t rows,
                const CaseReport& report) {
  std::vector<JsonObject> methods;
  for (const Verdict& verdict : report.verdicts) methods.push_back(json_of(verdict));
  JsonObject line("verify");
  line.add("case", case_name(trace))
      .add("trace", trace)
      .add("shape", json_of(shape_of(steps.front()), steps.size()))
      .add("backend", name_in(kBackends, args.options.backend))
      .add("reference", name_in(kReferences, args.options.backend == Backend::cuda ? ReferenceScorer::sm90 : args.reference))
      .add("rows", static_cast<std::int64_t>(rows))
      .add("methods", std::span<const JsonObject>(methods))
      .add("equal", report.equal());
  if (args.reference == ReferenceScorer::sm90 && args.options.backend == Backend::cpu) line.add("sm90", report.fields);
  fmt::print("{}\n", line.line());
}

/// Prints one case; true if everything was equal.
Result<bool> verify_case(const std::string& trace, const Steps& steps, const VerifyArgs& args) {
  auto report = args.reference == ReferenceScorer::cpu || args.options.backend == Backend::cuda ? check_methods(steps, args) : check_sm90(steps, args);
  if (!report) return tl::unexpected(report.error());
  const std::size_t rows = spread_rows(row_count(steps), args.rows).size();
  if (args.json) {
    print_json(trace, steps, args, rows, *report);
  } else {
    print_text(trace, steps, rows, *report);
  }
  std::fflush(stdout);
  return report->equal();
}

}  // namespace

Result<int> verify(const VerifyArgs& args) {
  bool equal = true;
  for (const std::string& path : args.traces) {
    auto trace = Trace::open(path);
    if (!trace) return tl::unexpected(trace.error());
    for (const std::int32_t topk : args.topk) {
      auto verified = verify_case(path, steps_of(*trace, topk), args);
      if (!verified) return tl::unexpected(verified.error());
      equal = equal && *verified;
    }
  }
  return equal ? kOk : kDifference;
}

}  // namespace dosa::cli
