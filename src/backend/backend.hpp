// What a backend must do.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "dosa/indexer.hpp"

namespace dosa {

struct PriceList;  // certificate/choose.hpp

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
  [[nodiscard]] virtual Result<Stats> counters(const Plan& plan, Workspace workspace) const = 0;
};

/// Errors: unsupported_device.
Result<std::unique_ptr<BackendImpl>> make_cpu_backend(const Options& options);
Result<std::unique_ptr<BackendImpl>> make_cuda_backend(const Options& options);

/// What the cpu backend takes work to cost when it chooses certificates; `implementation` is one of cpu_implementations().
PriceList cpu_prices(const ProblemShape& shape, std::string_view implementation);

/// "" if the cuda backend is built and finds a GPU that it has kernels for.
std::string cuda_unavailable_reason();

/// A problem copied to the GPU, with room for its selection: for programs and tests whose data is in host memory. Pages keep
/// their stride.
class DeviceCopy {
 public:
  virtual ~DeviceCopy() = default;
  /// Another problem of the same shapes in its place; without `keys`, those copied before stay.
  virtual Result<void> replace(const Problem& problem, bool keys) = 0;
  /// Recent winners of every request: -1 again.
  virtual Result<void> forget_recent() = 0;
  [[nodiscard]] virtual const Problem& problem() const = 0;
  [[nodiscard]] virtual const Selection& selection() const = 0;
  /// At least `bytes` of device memory; one block, grown as needed.
  virtual Result<Workspace> workspace(std::size_t bytes) = 0;
  /// Waits for the device and copies the selection to host arrays of the same shapes.
  virtual Result<void> fetch(const Selection& host) = 0;
};

/// `recent_width`: ids of each request in selection().recent; 0: absent.
/// Errors: unsupported_device, memory_budget (not enough device memory).
Result<std::unique_ptr<DeviceCopy>> copy_to_device(const Problem& problem, bool with_scores, std::int64_t recent_width = 0);

}  // namespace dosa
