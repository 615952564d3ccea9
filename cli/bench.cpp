// Methods interleaved in one process, so that a noisy moment hits all of them; equality of their rows is part of a
// result.
#include <algorithm>
#include <cstdio>
#include <fstream>

#include <fmt/format.h>

#include "backend/cpu/peak.hpp"
#include "base/error.hpp"
#include "base/keys.hpp"
#include "commands.hpp"
#include "console.hpp"
#include "io/names.hpp"
#include "io/run_json.hpp"
#include "run.hpp"

namespace dosa::cli {
namespace {

constexpr double kPeakSeconds = 0.3;  // a tenth of a second a loop: many time slices, and about as long as a run

/// Measurements of one thing, ascending.
struct Timing {
  std::vector<double> values;

  void add(double value) { values.insert(std::ranges::upper_bound(values, value), value); }
  [[nodiscard]] double median() const { return quantile(0.5); }
  [[nodiscard]] double quantile(double q) const {
    const double position = q * static_cast<double>(values.size() - 1);
    const auto low = static_cast<std::size_t>(position);
    const std::size_t high = std::min(low + 1, values.size() - 1);
    return values[low] + (position - static_cast<double>(low)) * (values[high] - values[low]);
  }
};

struct Contender {
  Method method;
  Runner runner;
  Timing timing;
  Stats stats;  ///< of the last run; on a GPU of one more, whose stages are timed one by one
};

/// One case: the contenders, and what the same threads could do at best meanwhile.
struct Race {
  std::vector<Contender> contenders;
  Timing peak;  ///< multiply-adds per second; one measurement a round; none on a GPU

  /// Multiply-adds per second that full scoring would have needed to take as long.
  [[nodiscard]] static double rate(const Contender& contender) {
    const ProblemShape& shape = contender.runner.plan().shape;
    return static_cast<double>(contender.stats.visible) * shape.heads * shape.dim / contender.timing.median();
  }

  /// Median of full scoring, the denominator of every ratio; 0 if dense does not take part.
  [[nodiscard]] double dense() const {
    const auto found = std::ranges::find(contenders, Method::dense, &Contender::method);
    return found == contenders.end() ? 0 : found->timing.median();
  }
};

/// "model name" of /proc/cpuinfo.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

/// The last queries of a problem only.
Problem last_queries(Problem problem, std::int64_t wanted) {
  const std::int64_t nq = problem.q.shape[0];
  if (wanted <= 0 || wanted >= nq) return problem;
  for (TensorView* view : {&problem.q, &problem.w, &problem.ks, &problem.ke}) {
    if (!view->present()) continue;
    const std::int64_t bytes = (nq - wanted) * view->stride[0] * static_cast<std::int64_t>(size_of(view->dtype));
    view->data = static_cast<const std::byte*>(view->data) + bytes;
    view->shape[0] = wanted;
  }
  return problem;
}

/// Counts and stage times of one method on a GPU, outside of the timed rounds: events between stages cost time.
Result<Stats> stage_times(const Steps& steps, Options options, Method method) {
  options.method = method;
  options.time_stages = true;
  auto runner = Runner::create(steps, options);
  if (!runner) return tl::unexpected(runner.error());
  for (int round = 0; round < 2; ++round) {
    if (auto done = runner->run(); !done) return tl::unexpected(done.error());
  }
  return runner->stats();
}

/// A B C A B C ...; one round before the clock starts, to fault pages in and fill caches.
Result<Race> race(const Steps& steps, const BenchArgs& args) {
  Race result;
  std::vector<Method> methods = args.methods;
  if (methods.empty()) methods = {Method::dense, Method::fused, Method::dosa, Method::automatic};
  for (const Method method : methods) {
    Options options = args.options;
    options.method = method;
    auto runner = Runner::create(steps, options);
    if (!runner) return tl::unexpected(runner.error());
    result.contenders.push_back({method, std::move(*runner), {}, {}});
  }
  Progress progress("timing, round", args.repeats + 1);
  for (std::int32_t round = 0; round <= args.repeats; ++round) {
    for (Contender& contender : result.contenders) {
      if (auto done = contender.runner.run(); !done) return tl::unexpected(done.error());
      if (round > 0) contender.timing.add(contender.runner.seconds());
    }
    if (round > 0 && args.options.backend == Backend::cpu) {
      result.peak.add(cpu::peak_fma_rate(result.contenders.front().runner.plan().threads, kPeakSeconds));
    }
    progress.advance();
  }
  for (Contender& contender : result.contenders) {
    contender.stats = contender.runner.stats();
    if (args.options.backend == Backend::cpu) continue;
    auto staged = stage_times(steps, args.options, contender.method);
    if (!staged) return tl::unexpected(staged.error());
    contender.stats = *staged;
  }
  return result;
}

/// Where the contenders' rows first differ from the first one's; nothing if all are equal.
std::optional<std::string> disagreement(const std::vector<Contender>& contenders) {
  const Rows& expected = contenders.front().runner.rows();
  for (const Contender& contender : contenders) {
    const Rows& rows = contender.runner.rows();
    for (std::int64_t row = 0; row < rows.nq; ++row) {
      if (auto difference = first_difference(rows.row_ids(row), rows.row_scores(row), expected.row_ids(row),
                                             expected.row_scores(row))) {
        return fmt::format("{} and {} differ in row {}, {}", name_in(kMethods, contender.method),
                           name_in(kMethods, contenders.front().method), row, *difference);
      }
    }
  }
  return std::nullopt;
}

void print_table(const Race& race) {
  const double dense = race.dense();
  fmt::print("  {:6} {:>10} {:>19} {:>9} {:>8} {:>9} {:>9} {:>9}\n", "method", "median ms", "spread (10..90 %)",
             "vs dense", "of peak", "screened", "rejected", "in full");
  for (const Contender& c : race.contenders) {
    const Stats& stats = c.stats;
    const double visible = std::max<double>(1, static_cast<double>(stats.visible));
    fmt::print("  {:6} {:10.2f} {:>19} {:>9} {:6.1f} % {:7.1f} % {:7.1f} % {:7.1f} %\n", name_in(kMethods, c.method),
               1e3 * c.timing.median(),
               fmt::format("{:.2f}..{:.2f}", 1e3 * c.timing.quantile(0.1), 1e3 * c.timing.quantile(0.9)),
               dense > 0 ? fmt::format("{:.2f}x", dense / c.timing.median()) : "-",
               race.peak.values.empty() ? 0.0 : 100 * Race::rate(c) / race.peak.median(), 100 * static_cast<double>(stats.screened) / visible,
               100 * rejected_share(stats), 100 * scored_share(stats));
  }
  for (const Contender& c : race.contenders) {
    if (c.method == Method::dense || c.method == Method::fused) continue;  // they have one path only
    for (const std::string& line : describe_paths(c.stats.path)) {
      fmt::print("  {}: {}\n", name_in(kMethods, c.method), line);
    }
  }
  for (const Contender& c : race.contenders) {
    if (!race.peak.values.empty()) break;
    const Stats& stats = c.stats;
    fmt::print("  {}, ms: seed {:.2f}, certify {:.2f}, screen {:.2f}, refine {:.2f}, in full {:.2f}, select {:.2f}\n",
               name_in(kMethods, c.method), 1e3 * stats.seconds_seed, 1e3 * stats.seconds_certify, 1e3 * stats.seconds_screen,
               1e3 * stats.seconds_refine, 1e3 * stats.seconds_score, 1e3 * stats.seconds_select);
  }
  if (!race.peak.values.empty()) fmt::print(
      "  peak: {:.1f} G multiply-adds/s in bare loops between the runs; of peak: as if every key had been scored\n",
      1e-9 * race.peak.median());
  fmt::print("  ids and score bits of all methods are equal on every row ({})\n",
             race.contenders.front().runner.rows().nq);
}

JsonObject json_of(const Contender& contender, const Race& race) {
  const Timing& timing = contender.timing;
  JsonObject json;
  json.add("method", name_in(kMethods, contender.method))
      .add("seconds_median", timing.median())
      .add("seconds_10", timing.quantile(0.1))
      .add("seconds_90", timing.quantile(0.9))
      .add("seconds", std::span<const double>(timing.values));
  if (!race.peak.values.empty()) json.add("of_peak", Race::rate(contender) / race.peak.median());
  if (race.dense() > 0) json.add("over_dense", race.dense() / timing.median());
  json.add("rejected", rejected_share(contender.stats))
      .add("scored_in_full", scored_share(contender.stats))
      .add("plan", contender.runner.plan().describe())
      .add("workspace_bytes", static_cast<std::int64_t>(contender.runner.plan().workspace_bytes))
      .add("stats", json_of(contender.stats));
  return json;
}

void print_json(const std::string& trace, const Race& race, const BenchArgs& args) {
  const Plan& plan = race.contenders.front().runner.plan();
  std::vector<JsonObject> methods;
  for (const Contender& contender : race.contenders) methods.push_back(json_of(contender, race));
  JsonObject line("bench");
  line.add("case", args.case_id.empty() ? case_name(trace) : args.case_id)
      .add("trace", case_name(trace))
      .add("version", version())
      .add("commit", args.commit)
      .add("cpu", cpu_name())
      .add("backend", name_in(kBackends, args.options.backend))
      .add("implementation", plan.implementation)
      .add("threads", plan.threads)
      .add("shape", json_of(plan.shape, race.contenders.front().runner.steps()))
      .add("repeats", args.repeats);
  if (!race.peak.values.empty()) line.add("peak_macs_per_second", race.peak.median());
  line.add("methods", std::span<const JsonObject>(methods))
      .add("equal", true);  // a case that differs prints no line
  fmt::print("{}\n", line.line());
}

Result<int> bench_case(const std::string& trace, const Steps& steps, const BenchArgs& args) {
  auto ran = race(steps, args);
  if (!ran) return tl::unexpected(ran.error());
  if (const auto difference = disagreement(ran->contenders)) {
    print_error(fmt::format("{} topk {}: {}; this is a bug of dosa", case_name(trace), steps.front().topk, *difference));
    return kDifference;
  }
  if (args.json) {
    print_json(trace, *ran, args);
  } else {
    const Plan& plan = ran->contenders.front().runner.plan();
    fmt::print("{}: {}; {}, threads {}\n", case_name(trace), describe(plan.shape, steps.size()), plan.implementation, plan.threads);
    print_table(*ran);
  }
  std::fflush(stdout);
  return kOk;
}

}  // namespace

Result<int> bench(const BenchArgs& args) {
  int code = kOk;
  for (const std::string& path : args.traces) {
    auto trace = Trace::open(path);
    if (!trace) return tl::unexpected(trace.error());
    if (args.queries > 0 && is_paged(trace->problem())) {
      return fail(ErrorCode::invalid_argument, fmt::format("--queries is {}; {} has steps of decoding, which belong together", args.queries, path));
    }
    for (const std::int32_t topk : args.topk) {
      Steps steps = steps_of(*trace, topk);
      for (Problem& step : steps) step = last_queries(step, args.queries);
      auto result = bench_case(path, steps, args);
      if (!result) return result;
      code = std::max(code, *result);
    }
  }
  return code;
}

}  // namespace dosa::cli
