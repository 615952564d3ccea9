// One problem, one method: outputs, runs, comparison and the fields every command reports.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "dosa/indexer.hpp"
#include "io/json.hpp"
#include "io/trace.hpp"

namespace dosa::cli {

/// Dense ids and scores of every query.
struct Rows {
  std::int64_t nq = 0;
  std::int64_t k = 0;
  std::vector<std::int32_t> ids;  // [nq, k]
  std::vector<float> scores;      // [nq, k]

  Rows() = default;
  Rows(std::int64_t queries, std::int64_t topk);

  /// `count` rows from `first` on.
  [[nodiscard]] Selection selection(std::int64_t first, std::int64_t count) noexcept;
  [[nodiscard]] Selection selection() noexcept { return selection(0, nq); }
  [[nodiscard]] std::span<const std::int32_t> row_ids(std::int64_t row) const;
  [[nodiscard]] std::span<const float> row_scores(std::int64_t row) const;
};

/// Problems of one shape, one after the other: the steps of a decode trace, or the one problem of any other.
using Steps = std::vector<Problem>;
Steps steps_of(const Trace& trace, std::int32_t topk);

/// Steps planned once for one set of options; each run overwrites `rows`, step by step. Keys in pages: a run begins without
/// recent winners and carries them from step to step. For the cuda backend keys are copied to the GPU once, the rest step by step.
class Runner {
 public:
  static Result<Runner> create(const Steps& steps, const Options& options);

  /// Wall seconds of all steps, copies to and from a GPU excluded, are kept in `seconds`.
  Result<void> run();

  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  [[nodiscard]] std::size_t steps() const noexcept { return steps_.size(); }
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }
  [[nodiscard]] const Rows& rows() const noexcept { return rows_; }
  [[nodiscard]] Rows& rows() noexcept { return rows_; }
  [[nodiscard]] double seconds() const noexcept { return seconds_; }

 private:
  Runner(Indexer indexer, Plan plan, Steps steps);
  Result<Stats> run_on_host();
  Result<Stats> run_on_device();

  Indexer indexer_;
  Plan plan_;
  Steps steps_;
  std::vector<std::int32_t> recent_;    // [requests, 9/8 topk]; empty: keys are contiguous, or on a GPU
  std::unique_ptr<DeviceCopy> device_;  // null: cpu backend
  Rows rows_;
  Stats stats_;
  double seconds_ = 0;
};

/// The first slot in which two rows differ, in id or in score bits, in words; nothing if they are equal.
std::optional<std::string> first_difference(std::span<const std::int32_t> ids, std::span<const float> scores,
                                            std::span<const std::int32_t> expected_ids,
                                            std::span<const float> expected_scores);

/// Calls work(0..count-1) on that many threads (0: one per CPU this process may use).
void for_each_index(std::int64_t count, std::int32_t threads, const std::function<void(std::int64_t)>& work);

/// CPUs that this process may use.
std::int32_t usable_cpus() noexcept;

/// At most `wanted` rows (0: all), evenly spread over nq.
std::vector<std::int64_t> spread_rows(std::int64_t nq, std::int64_t wanted);

/// Refuses an --out that is the trace being read, under whatever name: what is written would replace it.
std::optional<Error> refuse_to_replace(const std::string& trace, const std::string& out);

/// "demo-h32" of "traces/demo-h32.safetensors".
std::string case_name(const std::string& trace_path);

/// "128 queries x 32 heads, 32768 keys, topk 2048", or "64 steps of 2 requests x 1 draft tokens x 32 heads, ...".
std::string describe(const ProblemShape& shape, std::size_t steps = 1);

/// Per path taken: how many rows, and why.
std::vector<std::string> describe_paths(const PathCounts& path);

/// Share of the visible query-key pairs that a certificate rejected, that were scored before any bound, and that were
/// scored in full, before or after.
double rejected_share(const Stats& stats) noexcept;
double seed_share(const Stats& stats) noexcept;
double scored_share(const Stats& stats) noexcept;

}  // namespace dosa::cli
