#include "run.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <filesystem>
#include <sched.h>
#include <thread>

#include <fmt/format.h>

namespace dosa::cli {
namespace {

using Clock = std::chrono::steady_clock;

// The last winners, and as many again as an eighth of them of the steps before.
std::int64_t recent_width(const ProblemShape& shape) { return shape.topk + shape.topk / 8; }

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double share(std::int64_t part, std::int64_t whole) noexcept {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string score_text(float score) { return fmt::format("{} ({:#010x})", score, std::bit_cast<std::uint32_t>(score)); }

}  // namespace

Rows::Rows(std::int64_t queries, std::int64_t topk)
    : nq(queries),
      k(topk),
      ids(static_cast<std::size_t>(queries * topk)),
      scores(static_cast<std::size_t>(queries * topk)) {}

Selection Rows::selection(std::int64_t first, std::int64_t count) noexcept {
  return {dense_view<void>(ids.data() + first * k, DType::i32, {count, k}),
          dense_view<void>(scores.data() + first * k, DType::f32, {count, k})};
}

std::span<const std::int32_t> Rows::row_ids(std::int64_t row) const {
  return std::span(ids).subspan(static_cast<std::size_t>(row * k), static_cast<std::size_t>(k));
}

std::span<const float> Rows::row_scores(std::int64_t row) const {
  return std::span(scores).subspan(static_cast<std::size_t>(row * k), static_cast<std::size_t>(k));
}

Steps steps_of(const Trace& trace, std::int32_t topk) {
  Steps steps;
  for (std::int64_t step = 0; step < trace.steps(); ++step) {
    steps.push_back(trace.problem(step));
    steps.back().topk = topk;
  }
  return steps;
}

Runner::Runner(Indexer indexer, Plan plan, Steps steps)
    : indexer_(std::move(indexer)),
      plan_(std::move(plan)),
      steps_(std::move(steps)),
      rows_(plan_.shape.nq * static_cast<std::int64_t>(steps_.size()), plan_.shape.topk) {
  if (plan_.shape.page_size > 0 && plan_.options.backend == Backend::cpu) recent_.resize(static_cast<std::size_t>(plan_.shape.requests * recent_width(plan_.shape)));
}

Result<Runner> Runner::create(const Steps& steps, const Options& options) {
  auto indexer = Indexer::create(options);
  if (!indexer) return tl::unexpected(indexer.error());
  auto plan = indexer->plan(shape_of(steps.front()));
  if (!plan) return tl::unexpected(plan.error());
  Runner runner(std::move(*indexer), std::move(*plan), steps);
  if (options.backend == Backend::cuda) {
    const bool paged = runner.plan_.shape.page_size > 0;
    auto copy = copy_to_device(steps.front(), true, paged ? recent_width(runner.plan_.shape) : 0);
    if (!copy) return tl::unexpected(copy.error());
    runner.device_ = std::move(*copy);
  }
  return runner;
}

Result<void> Runner::run() {
  auto stats = device_ == nullptr ? run_on_host() : run_on_device();
  if (!stats) return tl::unexpected(stats.error());
  stats_ = *stats;
  return {};
}

Result<Stats> Runner::run_on_host() {
  std::ranges::fill(recent_, -1);
  const ProblemShape& shape = plan_.shape;
  const auto start = Clock::now();
  Stats total;
  std::int64_t row = 0;
  for (const Problem& step : steps_) {
    Selection out = rows_.selection(row, shape.nq);
    if (!recent_.empty()) out.recent = dense_view<void>(recent_.data(), DType::i32, {shape.requests, recent_width(shape)});
    auto stats = indexer_.run(plan_, step, out);
    if (!stats) return stats;
    total += *stats;
    row += shape.nq;
  }
  seconds_ = seconds_since(start);
  return total;
}

Result<Stats> Runner::run_on_device() {
  const auto workspace = device_->workspace(plan_.workspace_bytes);
  if (!workspace) return tl::unexpected(workspace.error());
  if (auto forgotten = device_->forget_recent(); !forgotten) return tl::unexpected(forgotten.error());
  Stats total;
  seconds_ = 0;
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    if (steps_.size() > 1) {
      if (auto replaced = device_->replace(steps_[step], false); !replaced) return tl::unexpected(replaced.error());
    }
    const auto start = Clock::now();
    const auto enqueued = indexer_.run(plan_, device_->problem(), device_->selection(), *workspace);
    if (!enqueued) return enqueued;
    const auto counted = indexer_.counters(plan_, *workspace);  // waits
    seconds_ += seconds_since(start);
    if (!counted) return counted;
    total += *enqueued;
    total.rows -= enqueued->rows;  // counted once; what it adds are seconds
    total += *counted;
    const auto first = static_cast<std::int64_t>(step) * plan_.shape.nq;
    if (auto fetched = device_->fetch(rows_.selection(first, plan_.shape.nq)); !fetched) return tl::unexpected(fetched.error());
  }
  return total;
}

std::optional<std::string> first_difference(std::span<const std::int32_t> ids, std::span<const float> scores,
                                            std::span<const std::int32_t> expected_ids,
                                            std::span<const float> expected_scores) {
  for (std::size_t slot = 0; slot < ids.size(); ++slot) {
    const bool same_bits =
        std::bit_cast<std::uint32_t>(scores[slot]) == std::bit_cast<std::uint32_t>(expected_scores[slot]);
    if (ids[slot] == expected_ids[slot] && same_bits) continue;
    return fmt::format("slot {}: id {} score {}, expected id {} score {}", slot, ids[slot], score_text(scores[slot]),
                       expected_ids[slot], score_text(expected_scores[slot]));
  }
  return std::nullopt;
}

std::int32_t usable_cpus() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

void for_each_index(std::int64_t count, std::int32_t threads, const std::function<void(std::int64_t)>& work) {
  std::atomic<std::int64_t> next = 0;
  const std::int64_t workers = std::min<std::int64_t>(count, threads > 0 ? threads : usable_cpus());
  std::vector<std::jthread> pool;
  for (std::int64_t worker = 0; worker < workers; ++worker) {
    pool.emplace_back([&] {
      for (std::int64_t index = next++; index < count; index = next++) work(index);
    });
  }
}

std::vector<std::int64_t> spread_rows(std::int64_t nq, std::int64_t wanted) {
  const std::int64_t count = wanted == 0 ? nq : std::min(nq, wanted);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) rows[static_cast<std::size_t>(i)] = i * nq / count;
  if (!rows.empty()) rows.back() = nq - 1;  // the row that sees most keys, where ranges grow
  return rows;
}

std::optional<Error> refuse_to_replace(const std::string& trace, const std::string& out) {
  std::error_code none;  // most often there is no file `out`
  if (!std::filesystem::equivalent(trace, out, none)) return std::nullopt;
  return Error{ErrorCode::invalid_argument, fmt::format("--out is {}, the trace that is read; give another file", out)};
}

std::string case_name(const std::string& trace_path) { return std::filesystem::path(trace_path).stem().string(); }

std::string describe(const ProblemShape& shape, std::size_t steps) {
  if (shape.page_size > 0) {
    return fmt::format("{} {} of {} {} x {} draft {} x {} heads, room for {} keys in pages of {}, topk {}", steps,
                       steps == 1 ? "step" : "steps", shape.requests, shape.requests == 1 ? "request" : "requests",
                       shape.nq / shape.requests, shape.nq == shape.requests ? "token" : "tokens", shape.heads, shape.nk,
                       shape.page_size, shape.topk);
  }
  return fmt::format("{} queries x {} heads, {} keys, topk {}", shape.nq, shape.heads, shape.nk, shape.topk);
}

std::vector<std::string> describe_paths(const PathCounts& path) {
  std::vector<std::string> lines;
  const auto line = [&lines](std::int64_t rows, std::string_view why) {
    if (rows > 0) lines.push_back(fmt::format("{} {} {}", rows, rows == 1 ? "row" : "rows", why));
  };
  line(path.dosa, "screened by certificates");
  line(path.full, "scored in full: the method says so");
  line(path.full_context, "scored in full: too few visible keys for screening to pay");
  line(path.full_loose, "scored in full: a certificate would reject, or rejected, too little to pay");
  line(path.full_exempt, "scored in full: non-finite or out-of-range query data has no certificate");
  line(path.short_rows, "with at most topk visible keys: every one of them wins");
  line(path.empty, "with no visible key");
  return lines;
}

double rejected_share(const Stats& stats) noexcept { return share(stats.screened - stats.survivors, stats.visible); }

double seed_share(const Stats& stats) noexcept { return share(stats.seeds, stats.visible); }

double scored_share(const Stats& stats) noexcept {
  return share(stats.seeds + stats.refined + stats.full, stats.visible);
}

}  // namespace dosa::cli
