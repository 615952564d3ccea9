// The public face: checks everything a caller can get wrong, then hands over to a backend.
#include "dosa/indexer.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <new>
#include <optional>

#include <fmt/format.h>

#include "backend/backend.hpp"
#include "base/carve.hpp"
#include "base/error.hpp"
#include "score/oracle.hpp"

namespace dosa {
namespace {

constexpr std::int32_t kMaxTopk = 4096;
constexpr std::int32_t kMostHeads = 128;
constexpr std::int64_t kMostKeys = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kMostThreads = 1024;

template <typename T>
std::optional<Error> check_range(const char* name, T value, T low, T high) {
  if (value >= low && value <= high) return std::nullopt;
  return Error{ErrorCode::invalid_argument, fmt::format("{} is {}; allowed are {} to {}", name, value, low, high)};
}

std::optional<Error> check_options(const Options& options) {
  const CertificateOptions& certificate = options.certificate;
  if (auto error = check_range("threads", options.threads, 0, kMostThreads)) return error;
  if (auto error = check_range("certificate.row_budget", certificate.row_budget, 0, 64)) return error;
  if (auto error = check_range("certificate.aggregates", certificate.aggregates, 0, 4)) return error;
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  if (auto error = check_range("memory_budget", options.memory_budget, std::int64_t{1}, most)) return error;
  if (auto error = check_range("min_context", options.min_context, std::int64_t{0}, most)) return error;
  return check_range("verify_rows", options.verify_rows, std::int64_t{0}, most);
}

std::optional<Error> check_shape(const ProblemShape& shape) {
  if (auto error = check_range("nq", shape.nq, std::int64_t{0}, kMostKeys)) return error;
  if (auto error = check_range("nk", shape.nk, std::int64_t{0}, kMostKeys)) return error;
  if (auto error = check_range("topk", shape.topk, 1, kMaxTopk)) return error;
  if (shape.heads < 1 || shape.heads > kMostHeads) {
    return Error{ErrorCode::unsupported_shape, fmt::format("heads is {}; the scorer has 1 to {}", shape.heads, kMostHeads)};
  }
  if (shape.dim != 32 && shape.dim != 64 && shape.dim != 128) {
    return Error{ErrorCode::unsupported_shape, fmt::format("dim is {}; the scorer has 32, 64 and 128", shape.dim)};
  }
  return std::nullopt;
}

template <typename Void>
std::optional<Error> check_tensor(const char* name, const BasicTensorView<Void>& view, DType dtype, Device device,
                                  std::initializer_list<std::int64_t> shape) {
  const auto wrong = [&](std::string what) { return Error{ErrorCode::invalid_argument, fmt::format("{} {}", name, what)}; };
  if (view.dtype != dtype) return wrong(fmt::format("is {}; it must be {}", name_of(view.dtype), name_of(dtype)));
  if (view.device != device) {
    return wrong(device == Device::cpu ? "is on a GPU; the cpu backend reads host memory"
                                       : "is in host memory; the cuda backend reads device memory");
  }
  const std::span<const std::int64_t> seen{view.shape.data(), static_cast<std::size_t>(std::clamp(view.rank, 0, view.max_rank))};
  if (!std::equal(seen.begin(), seen.end(), shape.begin(), shape.end())) {
    return wrong(fmt::format("has shape [{}]; it must be [{}]", fmt::join(seen, ", "), fmt::join(shape, ", ")));
  }
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  if (view.data == nullptr && !empty) return wrong("has no data");
  const auto align = reinterpret_cast<std::uintptr_t>(view.data) % size_of(dtype);
  if (align != 0) return wrong(fmt::format("is not aligned to its {} bytes", size_of(dtype)));
  return std::nullopt;
}

std::optional<Error> check_problem(const ProblemShape& shape, Backend backend, const Problem& problem, const Selection& out) {
  const Device device = backend == Backend::cpu ? Device::cpu : Device::cuda;
  const std::int64_t nq = shape.nq, nk = shape.nk;
  if (auto error = check_tensor("q", problem.q, DType::f8_e4m3, device, {nq, shape.heads, shape.dim})) return error;
  if (auto error = check_tensor("k", problem.k, DType::f8_e4m3, device, {nk, shape.dim})) return error;
  if (auto error = check_tensor("k_scale", problem.k_scale, DType::f32, device, {nk})) return error;
  if (auto error = check_tensor("w", problem.w, DType::f32, device, {nq, shape.heads})) return error;
  if (problem.ks.present()) {
    if (auto error = check_tensor("ks", problem.ks, DType::i32, device, {nq})) return error;
  }
  if (problem.ke.present()) {
    if (auto error = check_tensor("ke", problem.ke, DType::i32, device, {nq})) return error;
  }
  if (problem.hints.present()) {
    const std::int64_t rows = problem.hints.shape[0] == 1 ? 1 : nq;
    if (auto error = check_tensor("hints", problem.hints, DType::i32, device, {rows, problem.hints.shape[1]})) return error;
  }
  if (problem.topk != shape.topk) {
    return Error{ErrorCode::invalid_argument, fmt::format("topk is {}; the plan was made for {}", problem.topk, shape.topk)};
  }
  if (auto error = check_tensor("ids", out.ids, DType::i32, device, {nq, shape.topk})) return error;
  if (!out.scores.present()) return std::nullopt;
  return check_tensor("scores", out.scores, DType::f32, device, {nq, shape.topk});
}

// Debug mode: some rows again, by the oracle.
std::optional<Error> verify(const Plan& plan, const Problem& problem, const Selection& out) {
  const std::int64_t nq = plan.shape.nq;
  const std::int64_t rows = std::min(plan.options.verify_rows, nq);
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t row = i * nq / rows;
    const OracleRow expected = oracle_row(problem, row, ReferenceScorer::cpu, plan.options.order, plan.options.index_space);
    for (std::int32_t at = 0; at < plan.shape.topk; ++at) {
      const std::int32_t id = *out.ids.at<std::int32_t>(row, at);
      const std::int32_t want = expected.ids[static_cast<std::size_t>(at)];
      const float want_score = expected.scores[static_cast<std::size_t>(at)];
      const float score = out.scores.present() ? *out.scores.at<float>(row, at) : want_score;
      if (id == want && std::bit_cast<std::uint32_t>(score) == std::bit_cast<std::uint32_t>(want_score)) continue;
      return Error{ErrorCode::verification_failed, fmt::format("row {} slot {} holds id {} score {}; full scoring selects {} score {}",
                                                               row, at, id, score, want, want_score)};
    }
  }
  return std::nullopt;
}

}  // namespace

struct Indexer::Impl {
  Options options;
  std::string implementation;  // what options.implementation points to
  std::unique_ptr<BackendImpl> backend;
  std::unique_ptr<std::byte[]> memory;
  std::size_t memory_bytes = 0;

  Workspace workspace(std::size_t bytes) {
    const std::size_t wanted = bytes + Carver::alignment;
    if (memory_bytes < wanted) {
      memory.reset();
      memory.reset(new std::byte[wanted]);
      memory_bytes = wanted;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
    const std::size_t shift = (Carver::alignment - address % Carver::alignment) % Carver::alignment;
    return {memory.get() + shift, bytes};
  }
};

Indexer::Indexer(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Indexer::Indexer(Indexer&&) noexcept = default;
Indexer& Indexer::operator=(Indexer&&) noexcept = default;
Indexer::~Indexer() = default;

Result<Indexer> Indexer::create(const Options& options) {
  if (const auto error = check_options(options)) return tl::unexpected(*error);
  if (const std::string reason = unavailable_reason(options.backend); !reason.empty()) {
    return fail(ErrorCode::unsupported_device, reason);
  }
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->implementation = options.implementation;
  impl->options.implementation = impl->implementation;
  auto backend = options.backend == Backend::cpu ? make_cpu_backend(impl->options) : make_cuda_backend(impl->options);
  if (!backend) return tl::unexpected(backend.error());
  impl->backend = std::move(*backend);
  return Indexer(std::move(impl));
}

Result<Plan> Indexer::plan(const ProblemShape& shape) const {
  if (const auto error = check_shape(shape)) return tl::unexpected(*error);
  return impl_->backend->plan(shape);
}

Result<Stats> Indexer::run(const Plan& plan, const Problem& problem, const Selection& out, Workspace workspace,
                           std::span<RowReport> reports) const {
  if (const auto error = check_problem(plan.shape, plan.options.backend, problem, out)) return tl::unexpected(*error);
  if (workspace.bytes < plan.workspace_bytes || (workspace.data == nullptr && plan.workspace_bytes > 0)) {
    return fail(ErrorCode::workspace_too_small,
                fmt::format("workspace has {} bytes; the plan needs {}", workspace.bytes, plan.workspace_bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(workspace.data) % Carver::alignment != 0) {
    return fail(ErrorCode::invalid_argument, fmt::format("workspace is not aligned to {} bytes", Carver::alignment));
  }
  if (!reports.empty() && static_cast<std::int64_t>(reports.size()) != plan.shape.nq) {
    return fail(ErrorCode::invalid_argument, fmt::format("reports has {} entries; there are {} rows", reports.size(), plan.shape.nq));
  }
  auto stats = impl_->backend->run(plan, problem, out, workspace, reports);
  if (!stats || plan.options.verify_rows == 0 || plan.options.backend != Backend::cpu) return stats;
  if (const auto error = verify(plan, problem, out)) return tl::unexpected(*error);
  return stats;
}

Result<Stats> Indexer::counters(const Plan& plan, Workspace workspace) const { return impl_->backend->counters(plan, workspace); }

Result<Stats> Indexer::run(const Plan& plan, const Problem& problem, const Selection& out) {
  if (plan.options.backend != Backend::cpu) {
    return fail(ErrorCode::invalid_argument, "the cuda backend takes a workspace of the caller's");
  }
  return run(plan, problem, out, impl_->workspace(plan.workspace_bytes));
}

ProblemShape shape_of(const Problem& problem) noexcept {
  return {.nq = problem.q.shape[0],
          .nk = problem.k.shape[0],
          .heads = static_cast<std::int32_t>(problem.q.shape[1]),
          .dim = static_cast<std::int32_t>(problem.q.shape[2]),
          .topk = problem.topk};
}

std::string unavailable_reason(Backend backend) {
  return backend == Backend::cpu ? "" : cuda_unavailable_reason();
}

std::string Plan::describe() const {
  const std::string sizes =
      options.backend == Backend::cuda
          ? fmt::format("{} queries and {} keys a slice ({} slice{}), scores of {} x {} stored at a time", tile_queries, slice_keys,
                        key_slices, key_slices == 1 ? "" : "s", full_queries, full_keys)
          : fmt::format("threads {}, {} queries a group, {} keys a slice, panel of {}, {} records a query, {} key part{}", threads,
                        tile_queries, slice_keys, panel_keys, record_capacity, key_parts, key_parts == 1 ? "" : "s");
  return fmt::format("{} queries x {} keys, {} heads x {}, topk {}: {}, {}, workspace {} bytes{}{}", shape.nq, shape.nk, shape.heads,
                     shape.dim, shape.topk, implementation, sizes, workspace_bytes, reason.empty() ? "" : "; ", reason);
}

Stats& operator+=(Stats& sum, const Stats& other) noexcept {
  sum.rows += other.rows;
  sum.clamped_rows += other.clamped_rows;
  sum.path.empty += other.path.empty;
  sum.path.short_rows += other.path.short_rows;
  sum.path.dosa += other.path.dosa;
  sum.path.full += other.path.full;
  sum.path.full_context += other.path.full_context;
  sum.path.full_loose += other.path.full_loose;
  sum.path.full_exempt += other.path.full_exempt;
  sum.visible += other.visible;
  sum.seeds += other.seeds;
  sum.screened += other.screened;
  sum.survivors += other.survivors;
  sum.refined += other.refined;
  sum.full += other.full;
  sum.exempt += other.exempt;
  sum.bound_rows += other.bound_rows;
  sum.compactions += other.compactions;
  sum.predicted_work += other.predicted_work;
  sum.planned_rows += other.planned_rows;
  sum.seconds_seed += other.seconds_seed;
  sum.seconds_certify += other.seconds_certify;
  sum.seconds_screen += other.seconds_screen;
  sum.seconds_refine += other.seconds_refine;
  sum.seconds_select += other.seconds_select;
  sum.seconds_score += other.seconds_score;
  return sum;
}

}  // namespace dosa
