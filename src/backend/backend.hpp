// What a backend must do.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "dosa/indexer.hpp"

namespace dosa {

/// One group of neighbouring queries on its way through the stages; src/pipeline.cpp calls them in order. A stage may be
/// fused with its neighbours on a device; each keeps its name.
class QueryGroup {
 public:
  virtual ~QueryGroup() = default;

  /// Scores witnesses in full; tau is the K-th best of each query's.
  virtual void seed() = 0;
  /// Chooses row budget and form from the panel and builds every query's certificate. Queries whose certificate is
  /// missing, or too loose to pay, are left to score_in_full.
  virtual void certify() = 0;
  /// Next slice of keys whose bounds fit the memory budget; false after the last.
  virtual bool next_slice() = 0;
  /// Bounds of every query and key of the slice.
  virtual void screen() = 0;
  /// Scores the survivors of the slice in full, largest bounds first; tau rises.
  virtual void refine() = 0;
  /// The queries that are not screened: every visible key.
  virtual void score_in_full() = 0;
  /// Records to ids and scores.
  virtual void select() = 0;
};

/// The main path of one group.
void select_group(QueryGroup& group);

class BackendImpl {
 public:
  virtual ~BackendImpl() = default;

  /// Fixes every size of a run. The shape and the options' ranges have been checked.
  [[nodiscard]] virtual Result<Plan> plan(const ProblemShape& shape) const = 0;
  /// The problem has been checked against the plan, the workspace against the plan's size.
  virtual Result<Stats> run(const Plan& plan, const Problem& problem, const Selection& out, Workspace workspace,
                            std::span<RowReport> reports) const = 0;
};

/// Errors: unsupported_device.
Result<std::unique_ptr<BackendImpl>> make_cpu_backend(const Options& options);

}  // namespace dosa
