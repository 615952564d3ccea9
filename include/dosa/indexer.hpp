// Indexer: plan -> workspace size -> run. The one class a user must know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dosa/options.hpp"
#include "dosa/problem.hpp"
#include "dosa/result.hpp"

namespace dosa {

/// An immutable value: every tile, capacity and byte count of a run. May be shared between threads and Indexers that
/// were made with equal options.
struct Plan {
  ProblemShape shape;
  Options options;
  std::string implementation;      ///< name of the kernels that will run
  std::int32_t threads = 1;
  std::int32_t tile_queries = 0;   ///< queries that share a decoded key panel
  std::int64_t slice_keys = 0;     ///< keys of one query whose bounds or scores are held at a time
  std::int32_t panel_keys = 0;     ///< sampled keys from which row budget and form are chosen
  std::int32_t record_capacity = 0;  ///< records held per query before an exact compaction
  std::int32_t key_parts = 1;      ///< > 1: few queries, so that threads split keys
  std::int32_t key_slices = 1;     ///< cuda: slices of keys; each is spread over all of them
  std::int64_t list_capacity = 0;  ///< cuda: survivors of all queries of a slice that can be listed
  std::int32_t full_queries = 0;   ///< cuda: queries whose scores are stored at a time, where rows are scored in full,
  std::int64_t full_keys = 0;      ///< and keys of each
  std::string reason;              ///< why method `automatic` became what options.method says; else empty
  std::int64_t wave_requests = 1;  ///< requests whose rows, or key norms where these are kept, are held at a time
  std::size_t workspace_bytes = 0;

  /// One line a person can read.
  [[nodiscard]] std::string describe() const;
};

/// Scratch memory of a run and, on a GPU, the stream that orders it.
struct Workspace {
  void* data = nullptr;  ///< 64-byte aligned (cuda: device memory, 256); contents before and after a run are unspecified
  std::size_t bytes = 0;
  void* stream = nullptr;  ///< cudaStream_t; ignored by the cpu backend
};

/// Exact Top-K key ids of every query.
///
///   auto indexer = dosa::Indexer::create(options);
///   auto plan = indexer->plan(dosa::shape_of(problem));
///   auto stats = indexer->run(*plan, problem, {ids, scores}, {buffer, plan->workspace_bytes});
///
/// Thread rule: an Indexer serves one thread at a time; two Indexers with two workspaces may run at once.
class Indexer {
 public:
  /// Errors: unsupported_device (backend or implementation not available here), invalid_argument (an option's value).
  static Result<Indexer> create(const Options& options = {});

  Indexer(Indexer&&) noexcept;
  Indexer& operator=(Indexer&&) noexcept;
  ~Indexer();

  /// Errors: invalid_argument, unsupported_shape, memory_budget. Cost: microseconds; no allocation of workspace.
  [[nodiscard]] Result<Plan> plan(const ProblemShape& shape) const;

  /// Writes every row of `out`. Neither allocates nor keeps anything; results do not depend on the workspace's contents,
  /// on threads, implementation, method or plan. Errors leave `out` untouched, except verification_failed.
  /// Errors: invalid_argument (a tensor does not match the plan), workspace_too_small, verification_failed.
  /// cpu: done on return, and the Stats are complete; `reports` is empty or has one entry per row to fill.
  /// cuda: work is enqueued on workspace.stream and nothing waits for it (safe under graph capture); Stats hold what the host
  /// knows, counters() the rest; reports must be empty.
  Result<Stats> run(const Plan& plan, const Problem& problem, const Selection& out, Workspace workspace,
                    std::span<RowReport> reports = {}) const;

  /// What the last run on this workspace counted. cuda: waits for workspace.stream. cpu: nothing, run has returned it.
  [[nodiscard]] Result<Stats> counters(const Plan& plan, Workspace workspace) const;

  /// The same with a workspace that the Indexer keeps and grows as needed (cpu backend).
  Result<Stats> run(const Plan& plan, const Problem& problem, const Selection& out);

 private:
  struct Impl;
  explicit Indexer(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

/// The shape of a problem's tensors, unchecked (run checks them).
ProblemShape shape_of(const Problem& problem) noexcept;

/// Names of the CPU implementations that this CPU can run, fastest first; "scalar" is always last.
std::vector<std::string> cpu_implementations();

/// "" if the backend can run here, else the reason why not.
std::string unavailable_reason(Backend backend);

const char* version() noexcept;

}  // namespace dosa
