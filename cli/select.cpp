#include <algorithm>

#include <fmt/format.h>

#include "commands.hpp"
#include "console.hpp"
#include "io/names.hpp"
#include "io/run_json.hpp"
#include "run.hpp"

namespace dosa::cli {
namespace {

void print_summary(const SelectArgs& args, const Runner& runner) {
  const Stats& stats = runner.stats();
  fmt::print("{}: {}\n", case_name(args.trace), describe(runner.plan().shape, runner.steps()));
  fmt::print("method    {} on {}/{}, threads {}\n", name_in(kMethods, args.options.method),
             name_in(kBackends, args.options.backend), runner.plan().implementation, runner.plan().threads);
  for (const std::string& line : describe_paths(stats.path)) fmt::print("path      {}\n", line);
  fmt::print("keys      {:.1f} % rejected by their bound, {:.1f} % scored in full", 100 * rejected_share(stats),
             100 * scored_share(stats));
  // Seeds are bounded like all keys, so the two shares can come to more than all.
  if (stats.seeds > 0) fmt::print(" ({:.1f} % before any bound, as seeds)", 100 * seed_share(stats));
  fmt::print("\n");
  if (stats.clamped_rows > 0) fmt::print("ranges    {} rows were clamped to the keys there are\n", stats.clamped_rows);
  if (args.options.verify_rows > 0) {
    const std::int64_t each = std::min(args.options.verify_rows, runner.plan().shape.nq);
    fmt::print("verified  {} rows, equal to full scoring\n", each * static_cast<std::int64_t>(runner.steps()));
  }
  fmt::print("time      {:.1f} ms\n", 1e3 * runner.seconds());
}

void print_json(const SelectArgs& args, const Runner& runner) {
  JsonObject json("select");
  json.add("case", case_name(args.trace))
      .add("trace", args.trace)
      .add("shape", json_of(runner.plan().shape, runner.steps()))
      .add("method", name_in(kMethods, args.options.method))
      .add("backend", name_in(kBackends, args.options.backend))
      .add("implementation", runner.plan().implementation)
      .add("threads", runner.plan().threads)
      .add("order", name_in(kOrders, args.options.order))
      .add("ids", name_in(kIndexSpaces, args.options.index_space))
      .add("plan", runner.plan().describe())
      .add("seconds", runner.seconds())
      .add("stats", json_of(runner.stats()));
  if (!args.out.empty()) json.add("out", args.out);
  fmt::print("{}\n", json.line());
}

}  // namespace

Result<int> select(const SelectArgs& args) {
  auto trace = Trace::open(args.trace);
  if (!trace) return tl::unexpected(trace.error());
  if (auto refused = refuse_to_replace(args.trace, args.out)) return tl::unexpected(*refused);
  auto runner = Runner::create(steps_of(*trace, args.topk), args.options);
  if (!runner) return tl::unexpected(runner.error());
  {
    const Progress progress(fmt::format("selecting for {}", describe(runner->plan().shape, runner->steps())));
    if (auto done = runner->run(); !done) return tl::unexpected(done.error());
  }
  if (!args.out.empty()) {
    const Metadata metadata = {{"trace", args.trace},
                               {"topk", fmt::format("{}", args.topk)},
                               {"order", std::string(name_in(kOrders, args.options.order))},
                               {"ids", std::string(name_in(kIndexSpaces, args.options.index_space))}};
    if (auto saved = save_selection(args.out, runner->rows().selection(), metadata); !saved) {
      return tl::unexpected(saved.error());
    }
  }
  if (args.json) {
    print_json(args, *runner);
  } else if (args.out.empty()) {
    print_summary(args, *runner);
  }
  return kOk;
}

}  // namespace dosa::cli
