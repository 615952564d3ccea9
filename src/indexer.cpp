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
#include "base/check.hpp"
#include "base/error.hpp"
#include "base/keys.hpp"
#include "score/oracle.hpp"

namespace dosa {
namespace {

constexpr std::int32_t kMaxTopk = 4096;
constexpr std::int32_t kMostHeads = 128;
constexpr std::int64_t kMostKeys = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kMostThreads = 1024;

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
  if (auto error = check_range("requests", shape.requests, std::int64_t{0}, kMostKeys)) return error;
  return shape.page_size == 0 ? std::nullopt : check_page_size(shape.page_size);
}

std::optional<Error> check_pages(const ProblemShape& shape, Device device, const Problem& problem, IndexSpace space) {
  const auto wrong = [](std::string what) { return Error{ErrorCode::invalid_argument, std::move(what)}; };
  const TensorView& cache = problem.kv_cache;
  if (problem.k.present() || problem.k_scale.present()) return wrong("k is given beside kv_cache; keys are contiguous or in pages");
  if (auto error = check_page_pool("kv_cache", cache, device, shape.page_size, shape.dim)) return error;
  if (space == IndexSpace::slot && cache.shape[0] > kMostKeys / shape.page_size) {
    return wrong(fmt::format("kv_cache has {} pages; slot ids of {} keys a page reach {} pages", cache.shape[0], shape.page_size,
                             kMostKeys / shape.page_size));
  }
  if (auto error = check_tensor("block_table", problem.block_table, DType::i32, device, {shape.requests, shape.nk / shape.page_size})) {
    return error;
  }
  if (problem.requests.present()) return check_tensor("requests", problem.requests, DType::i32, device, {shape.nq});
  if (shape.requests > 0 ? shape.nq % shape.requests != 0 : shape.nq > 0) {
    return wrong(fmt::format("q has {} rows; without `requests` they must be a multiple of the {} rows of block_table", shape.nq, shape.requests));
  }
  return std::nullopt;
}

// Which pages rows see: readable by the host only where the cpu backend runs.
std::optional<Error> check_page_ids(const Problem& problem) {
  const auto wrong = [](std::string what) { return Error{ErrorCode::invalid_argument, std::move(what)}; };
  const std::int64_t page_size = problem.kv_cache.shape[1];
  std::int64_t last_request = -1;
  VisibleRange checked;  // pages of last_request
  for (std::int64_t row = 0; row < problem.q.shape[0]; ++row) {
    const std::int64_t request = request_of(problem, row);
    if (request < 0 || request >= request_count(problem)) {
      return wrong(fmt::format("requests[{}] is {}; block_table has rows 0 to {}", row, request, request_count(problem) - 1));
    }
    const VisibleRange keys = visible_range(problem, row);
    if (keys.size() == 0) continue;
    const VisibleRange pages{keys.begin / page_size, (keys.end + page_size - 1) / page_size};
    if (request != last_request || pages.begin > checked.end || pages.end < checked.begin) checked = {pages.begin, pages.begin};
    last_request = request;
    for (std::int64_t page = pages.begin; page < pages.end; ++page) {
      if (checked.contains(page)) page = std::min(checked.end, pages.end);  // rows see mostly the same pages
      if (page == pages.end) break;
      const std::int32_t id = *problem.block_table.at<std::int32_t>(request, page);
      if (id >= 0 && id < problem.kv_cache.shape[0]) continue;
      return wrong(fmt::format("block_table[{}, {}] is {}, which row {} sees; pages are 0 to {}", request, page, id, row,
                               problem.kv_cache.shape[0] - 1));
    }
    checked = {std::min(checked.begin, pages.begin), std::max(checked.end, pages.end)};
  }
  return std::nullopt;
}

std::optional<Error> check_keys(const ProblemShape& shape, Device device, const Problem& problem, IndexSpace space) {
  if (shape.page_size > 0) return check_pages(shape, device, problem, space);
  if (auto error = check_tensor("k", problem.k, DType::f8_e4m3, device, {shape.nk, shape.dim})) return error;
  if (problem.kv_cache.present()) return Error{ErrorCode::invalid_argument, "kv_cache is given; the plan was made for contiguous keys"};
  if (space == IndexSpace::slot) {
    return Error{ErrorCode::invalid_argument, "index_space is slot; contiguous keys have absolute and relative ids"};
  }
  return check_tensor("k_scale", problem.k_scale, DType::f32, device, {shape.nk});
}

std::optional<Error> check_problem(const Plan& plan, const Problem& problem, const Selection& out) {
  const ProblemShape& shape = plan.shape;
  const Device device = plan.options.backend == Backend::cpu ? Device::cpu : Device::cuda;
  const std::int64_t nq = shape.nq;
  if (auto error = check_tensor("q", problem.q, DType::f8_e4m3, device, {nq, shape.heads, shape.dim})) return error;
  if (auto error = check_keys(shape, device, problem, plan.options.index_space)) return error;
  if (auto error = check_tensor("w", problem.w, DType::f32, device, {nq, shape.heads})) return error;
  if (problem.ks.present()) {
    if (auto error = check_tensor("ks", problem.ks, DType::i32, device, {nq})) return error;
  }
  if (problem.ke.present()) {
    // Draft tokens: [requests, n] has the rows one after the other.
    const std::int64_t n = problem.ke.rank == 2 ? problem.ke.shape[1] : 0;
    const auto error = n > 0 && nq % n == 0 ? check_tensor("ke", problem.ke, DType::i32, device, {nq / n, n})
                                            : check_tensor("ke", problem.ke, DType::i32, device, {nq});
    if (error) return error;
  }
  if (problem.hints.present()) {
    const std::int64_t given = problem.hints.shape[0];
    const std::int64_t rows = given == 1 || (shape.page_size > 0 && given == shape.requests) ? given : nq;
    if (auto error = check_tensor("hints", problem.hints, DType::i32, device, {rows, problem.hints.shape[1]})) return error;
  }
  if (problem.topk != shape.topk) {
    return Error{ErrorCode::invalid_argument, fmt::format("topk is {}; the plan was made for {}", problem.topk, shape.topk)};
  }
  if (auto error = check_tensor("ids", const_view(out.ids), DType::i32, device, {nq, shape.topk})) return error;
  if (out.scores.present()) {
    if (auto error = check_tensor("scores", const_view(out.scores), DType::f32, device, {nq, shape.topk})) return error;
  }
  if (out.recent.present()) {
    if (auto error = check_tensor("recent", const_view(out.recent), DType::i32, device, {shape.requests, out.recent.shape[1]})) return error;
    if (out.recent.stride[1] != 1) {
      return Error{ErrorCode::invalid_argument, fmt::format("recent has stride {} along a row; it must be 1", out.recent.stride[1])};
    }
  }
  return shape.page_size > 0 && device == Device::cpu ? check_page_ids(problem) : std::nullopt;
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
  if (const auto error = check_problem(plan, problem, out)) return tl::unexpected(*error);
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
          .nk = key_count(problem),
          .heads = static_cast<std::int32_t>(problem.q.shape[1]),
          .dim = static_cast<std::int32_t>(problem.q.shape[2]),
          .topk = problem.topk,
          .requests = request_count(problem),
          .page_size = is_paged(problem) ? static_cast<std::int32_t>(problem.kv_cache.shape[1]) : 0};
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
  return fmt::format("{} queries{} x {} keys, {} heads x {}, topk {}: {}, {}, workspace {} bytes{}{}", shape.nq,
                     shape.page_size > 0 ? fmt::format(" of {} requests", shape.requests) : "", shape.nk, shape.heads, shape.dim, shape.topk, implementation, sizes, workspace_bytes, reason.empty() ? "" : "; ", reason);
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
