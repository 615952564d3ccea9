// The Hopper backend: what it takes, sizes, and the order of a run.
#include <algorithm>
#include <bit>
#include <optional>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "backend/backend.hpp"
#include "backend/cuda/errors.hpp"
#include "backend/cuda/group.hpp"
#include "base/check.hpp"
#include "base/error.hpp"

namespace dosa {
namespace cuda {
namespace {

constexpr std::int64_t kKeyAlign = 1024;         // slices of keys start at multiples of this
constexpr std::int64_t kRowAlign = 64;           // rows that fill whole query tiles at any number of heads
constexpr std::int64_t kFewestFiltered = std::int64_t{48} << 20;  // query-key pairs of a step: fewer are stored and selected sooner than tau is found
constexpr std::int64_t kMostGathered = std::int64_t{1} << 30;  // keys of all requests: ids are 32 bits
constexpr std::int64_t kFewestKeys = 32 * 1024;  // shorter slices starve the chip
constexpr std::int64_t kFewestFused = 256 * 1024;  // keys: below, the sample costs what stores do
constexpr std::int64_t kMostRows = 16 * 1024;    // of a slice of queries: more gain nothing
constexpr std::int64_t kFewestQueries = 256;     // fewer are scored in full by `automatic`
constexpr std::int64_t kMostSlices = 12;         // of keys, unless memory is short,
constexpr std::int64_t kSlicePairs = std::int64_t{1} << 29;  // each with so many query-key pairs at least

std::int64_t round_up(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
std::int64_t round_down(std::int64_t value, std::int64_t multiple) { return value / multiple * multiple; }

// Slices of rows are multiples of this: requests whose keys are scored in pages stay whole.
std::int64_t row_align(const ProblemShape& shape) {
  return scores_pages(shape) ? kRowAlign * std::max<std::int64_t>(1, shape.nq / std::max<std::int64_t>(1, shape.requests)) : kRowAlign;
}

class CudaBackend final : public BackendImpl {
 public:
  CudaBackend(const Options& options, int multiprocessors) : options_(options), multiprocessors_(multiprocessors) {}

  [[nodiscard]] Result<Plan> plan(const ProblemShape& shape) const override;
  Result<Stats> run(const Plan& plan, const Problem& problem, const Selection& out, Workspace workspace,
                    std::span<RowReport> reports) const override;
  [[nodiscard]] Result<Stats> counters(const Plan& plan, Workspace workspace) const override;

 private:
  void resolve_method(Plan& plan) const;
  [[nodiscard]] bool slice_keys(Plan& plan) const;
  [[nodiscard]] bool slice_scores(Plan& plan) const;
  [[nodiscard]] bool fits(Plan& plan) const;
  [[nodiscard]] bool slice_queries(Plan& plan) const;

  Options options_;
  int multiprocessors_;
};

void CudaBackend::resolve_method(Plan& plan) const {
  const ProblemShape& shape = plan.shape;
  Options& options = plan.options;
  if (options.min_context == 0) options.min_context = kFewestKeys;
  if (options.method == Method::automatic && scores_pages(shape)) {
    const std::int64_t pairs = shape.nq * shape.nk;
    options.method = pairs >= kFewestFiltered ? Method::dosa : Method::dense;
    plan.reason = pairs >= kFewestFiltered ? "dosa: only scores that reach the tau of hinted keys are kept"
                                           : fmt::format("dense: {} queries of {} keys, fewer than {} pairs", shape.nq, shape.nk, kFewestFiltered);
    return;
  }
  if (options.method != Method::automatic) {
    if (options.method == Method::dosa) options.min_context = 0;
    return;
  }
  options.method = Method::dense;
  if (shape.nk < options.min_context) {
    plan.reason = fmt::format("dense: {} keys, fewer than min_context {}", shape.nk, options.min_context);
  } else if (shape.nq < kFewestQueries) {
    plan.reason = fmt::format("dense: {} queries, fewer than {}", shape.nq, kFewestQueries);
  } else if (shape.heads > kMaxCertifiedHeads) {
    if (shape.nk >= kFewestFused) options.method = Method::fused;
    plan.reason = fmt::format("{}: {} heads; certificates are made for at most {}",
                              options.method == Method::fused ? "fused" : "dense", shape.heads, kMaxCertifiedHeads);
  } else {
    options.method = Method::dosa;
    plan.reason = "dosa, except for rows whose certificate is predicted to be too loose";
  }
}

// Slices of keys, such that masks, lists and records of plan.tile_queries rows keep to the memory budget. Several at once where
// there is work enough, because tau is guessed from the first ones.
bool CudaBackend::slice_keys(Plan& plan) const {
  const std::int64_t rows = plan.tile_queries, all_keys = std::max<std::int64_t>(key_room(plan.shape), 1);
  const std::int64_t group = group_rows(plan.shape.heads), groups = (rows + group - 1) / group;
  for (std::int64_t slices = std::clamp<std::int64_t>(rows * all_keys / kSlicePairs, 1, kMostSlices);; slices *= 2) {
    plan.key_slices = static_cast<std::int32_t>(slices);
    plan.slice_keys = round_up((all_keys + slices - 1) / slices, kKeyAlign);
    plan.list_capacity = groups * std::max(seed_stride(plan.shape.topk), plan.slice_keys / kListShare);
    if (static_cast<std::int64_t>(Arrays(plan, nullptr).bytes) <= options_.memory_budget) return true;
    if (plan.slice_keys <= kFewestKeys) return false;
  }
}

// Scores in what is left: all rows with all keys; then fewer rows, as long as they fill the chip; then fewer keys.
bool CudaBackend::slice_scores(Plan& plan) const {
  const std::int64_t rows = plan.tile_queries, all_keys = round_up(std::max<std::int64_t>(key_room(plan.shape), 1), kKeyAlign);
  const std::int64_t align = row_align(plan.shape);
  const std::int64_t fewest_keys = std::min(kFewestKeys, all_keys);
  const std::int64_t room = options_.memory_budget - static_cast<std::int64_t>(Arrays(plan, nullptr).bytes_beside_lists) -
                            static_cast<std::int64_t>(Carver::alignment);
  const std::int64_t pairs = room / static_cast<std::int64_t>(sizeof(float));
  if (pairs < align * fewest_keys) return false;
  std::int64_t full = std::clamp(round_down(pairs / all_keys, align), std::min(rows, 2 * align), rows);
  if (full * fewest_keys > pairs) full = align;
  plan.full_queries = static_cast<std::int32_t>(full);
  plan.full_keys = std::clamp(round_down(pairs / full, kKeyAlign), fewest_keys, all_keys);
  return true;
}

// Everything beside the keys' own data grows with the rows of a slice.
bool CudaBackend::fits(Plan& plan) const {
  plan.full_queries = 0;
  plan.full_keys = 0;
  plan.slice_keys = plan.list_capacity = 0;
  plan.key_slices = 1;
  if (screens(plan) && !slice_keys(plan)) return false;
  return static_cast<std::int64_t>(Arrays(plan, nullptr).bytes) <= options_.memory_budget && slice_scores(plan);
}

// As many rows at once as fit.
bool CudaBackend::slice_queries(Plan& plan) const {
  const std::int64_t align = row_align(plan.shape);
  std::int64_t rows = std::min(round_down(kMostRows, align), round_up(std::max<std::int64_t>(plan.shape.nq, 1), align));
  for (;; rows = round_up(rows / 2, align)) {
    plan.tile_queries = static_cast<std::int32_t>(rows);
    if (fits(plan)) return true;
    if (rows == align) return false;
  }
}

Result<Plan> CudaBackend::plan(const ProblemShape& shape) const {
  if (shape.dim != kDim) {
    return fail(ErrorCode::unsupported_shape, fmt::format("dim is {}; the sm90 scorer has {}", shape.dim, kDim));
  }
  if (gathers(shape) && key_room(shape) > kMostGathered) {
    return fail(ErrorCode::unsupported_shape,
                fmt::format("{} requests of {} keys; the cuda backend gathers at most {} keys for {} queries", shape.requests, shape.nk,
                            kMostGathered, shape.nq));
  }
  Plan plan;
  plan.shape = shape;
  plan.options = options_;
  plan.implementation = "sm90a";
  resolve_method(plan);
  bool found = slice_queries(plan);
  if (!found && options_.method == Method::automatic && plan.options.method != Method::dense) {
    plan.reason = fmt::format("dense: records of one slice of queries do not fit memory_budget {}", options_.memory_budget);
    plan.options.method = Method::dense;
    found = slice_queries(plan);
  }
  if (!found) {
    return fail(ErrorCode::memory_budget,
                fmt::format("memory_budget is {} bytes; {} queries over {} keys at topk {} need more", options_.memory_budget,
                            shape.nq, shape.nk, shape.topk));
  }
  if (!screens(plan)) plan.slice_keys = plan.options.method == Method::dense ? plan.full_keys : key_room(shape);
  plan.workspace_bytes = Arrays(plan, nullptr).bytes;
  return plan;
}

Pages pages_of(const ProblemShape& shape, const Problem& problem) {
  if (shape.page_size == 0) return {};
  const bool owned = problem.requests.present();
  return {.page_shift = std::countr_zero(static_cast<unsigned>(shape.page_size)),
          .pool = problem.kv_cache.at<std::uint8_t>(),
          .stride = problem.kv_cache.stride[0],
          .count = problem.kv_cache.shape[0],
          .table = problem.block_table.at<std::int32_t>(),
          .table_stride = problem.block_table.stride[0],
          .block_stride = problem.block_table.stride[1],
          .requests = shape.requests,
          .owner = owned ? problem.requests.at<std::int32_t>() : nullptr,
          .queries = owned || shape.requests == 0 ? 0 : shape.nq / shape.requests};
}

// What the kernels take for granted about strides.
Result<Inputs> inputs_of(const ProblemShape& shape, const Problem& problem, const Selection& out) {
  const auto refuse = [](const char* name, const char* allowed) {
    return fail(ErrorCode::invalid_argument, fmt::format("{} is not {}, as the cuda backend needs it", name, allowed));
  };
  if (!is_dense(problem.q)) return refuse("q", "contiguous");
  if (problem.k.present() && !is_dense(problem.k)) return refuse("k", "contiguous");
  if (problem.k_scale.present() && !is_dense(problem.k_scale)) return refuse("k_scale", "contiguous");
  if (problem.requests.present() && !is_dense(problem.requests)) return refuse("requests", "contiguous");
  if (problem.ks.present() && !is_dense(problem.ks)) return refuse("ks", "contiguous");
  if (problem.ke.present() && !is_dense(problem.ke)) return refuse("ke", "contiguous");
  if (shape.heads > 1 && problem.w.stride[1] != 1) return refuse("w", "contiguous along heads");
  if (shape.topk > 1 && out.ids.stride[1] != 1) return refuse("ids", "contiguous along a row");
  if (shape.topk > 1 && out.scores.present() && out.scores.stride[1] != 1) return refuse("scores", "contiguous along a row");
  for (const TensorView* view : {&problem.q, &problem.k}) {
    if (reinterpret_cast<std::uintptr_t>(view->data) % 16 != 0) return refuse(view == &problem.q ? "q" : "k", "aligned to 16 bytes");
  }
  return Inputs{.q = problem.q.at<std::uint8_t>(),
                .k = problem.k.at<std::uint8_t>(),
                .k_scale = problem.k_scale.at<float>(),
                .w = problem.w.at<float>(),
                .ks = problem.ks.present() ? problem.ks.at<std::int32_t>() : nullptr,
                .ke = problem.ke.present() ? problem.ke.at<std::int32_t>() : nullptr,
                .w_stride = problem.w.stride[0],
                .nq = shape.nq,
                .nk = shape.nk,
                .heads = shape.heads,
                .pages = pages_of(shape, problem)};
}

// The caller's hints, or else the recent winners.
Hints hints_of(const ProblemShape& shape, const Problem& problem, const Selection& out) {
  const bool given = problem.hints.present();
  if (!given && !out.recent.present()) return {};
  const TensorView ids = given ? problem.hints : const_view(out.recent);
  const bool by_query = given && ids.shape[0] == shape.nq, by_request = !by_query && ids.shape[0] != 1;
  return {.ids = ids.at<std::int32_t>(),
          .query_stride = by_query ? ids.stride[0] : 0,
          .request_stride = by_request ? ids.stride[0] : 0,
          .stride = ids.stride[1],
          .width = static_cast<int>(std::min(ids.shape[1], most_hints(shape.topk)))};
}

Inputs gathered(const Inputs& in, const ProblemShape& shape, const Arrays& arrays) {
  Inputs all = in;
  all.k = arrays.k;
  all.k_scale = arrays.k_scale;
  all.ks = arrays.ks;
  all.ke = arrays.ke;
  all.nk = key_room(shape);
  all.pages = {};
  return all;
}

Result<Stats> CudaBackend::run(const Plan& plan, const Problem& problem, const Selection& out, Workspace workspace,
                               std::span<RowReport> reports) const {
  if (!reports.empty()) return fail(ErrorCode::invalid_argument, "the cuda backend makes no row reports");
  const auto inputs = inputs_of(plan.shape, problem, out);
  if (!inputs) return tl::unexpected(inputs.error());
  StageClock clock;
  const Arrays arrays(plan, workspace.data);
  const Run run{plan,
                *inputs,
                gathers(plan.shape) ? gathered(*inputs, plan.shape, arrays) : *inputs,
                arrays,
                out,
                hints_of(plan.shape, problem, out),
                options_.method == Method::dosa,
                multiprocessors_,
                static_cast<cudaStream_t>(workspace.stream),
                plan.options.time_stages ? &clock : nullptr};
  cudaError_t error = cudaMemsetAsync(arrays.counters, 0, arrays.bytes_to_clear, run.stream);
  if (error == cudaSuccess && gathers(plan.shape)) {
    error = launch_gather_pages({run.given, arrays.k, arrays.k_scale, arrays.ks, arrays.ke, arrays.seen_to}, run.stream);
  }
  if (error == cudaSuccess && screens(plan)) {
    error = launch_keys({run.in.k, run.in.k_scale, run.in.nk, arrays.rho, arrays.inv_alpha, arrays.exempt, &arrays.counters->exempt,
                         plan.key_slices, plan.slice_keys},
                        run.stream);
  }
  if (error == cudaSuccess && samples(plan)) {
    error = launch_gather({run.in.k, run.in.k_scale, sample_of(run.in.nk), arrays.sample_k, arrays.sample_scale}, run.stream);
  }
  for (std::int64_t row = 0; row < run.in.nq && error == cudaSuccess; row += plan.tile_queries) {
    CudaGroup group(run, row);
    select_group(group);
    error = group.error();
  }
  if (error != cudaSuccess) return device_error("a kernel could not be launched", error);
  Stats stats;
  stats.rows = run.in.nq;
  if (run.clock != nullptr) error = clock.read(run.stream, stats);
  if (error != cudaSuccess) return device_error("the stages could not be timed", error);
  return stats;
}

Result<Stats> CudaBackend::counters(const Plan& plan, Workspace workspace) const {
  const auto stream = static_cast<cudaStream_t>(workspace.stream);
  Counters counted{};
  cudaError_t error = cudaMemcpyAsync(&counted, workspace.data, sizeof(Counters), cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return device_error("counters could not be read", error);
  const auto whole = [](std::uint64_t count) { return static_cast<std::int64_t>(count); };
  Stats stats;
  stats.rows = plan.shape.nq;
  stats.clamped_rows = whole(counted.clamped_rows);
  stats.path = {.empty = whole(counted.empty),
                .short_rows = whole(counted.short_rows),
                .dosa = whole(counted.dosa),
                .full = whole(counted.full),
                .full_context = whole(counted.full_context),
                .full_loose = whole(counted.full_loose),
                .full_exempt = whole(counted.full_exempt)};
  stats.visible = whole(counted.visible);
  stats.seeds = whole(counted.seeds);
  stats.screened = whole(counted.screened);
  stats.survivors = whole(counted.survivors);
  stats.refined = whole(counted.refined);
  stats.full = whole(counted.scored_in_full);
  stats.exempt = whole(counted.exempt);
  stats.bound_rows = whole(counted.bound_rows);
  return stats;
}

// What this backend computes of what Options can ask.
std::optional<Error> refusal(const Options& options) {
  const auto refuse = [](std::string message) { return Error{ErrorCode::invalid_argument, std::move(message)}; };
  const CertificateOptions& certificate = options.certificate;
  if (options.verify_rows != 0) return refuse("verify_rows needs the cpu backend, which waits for its results");
  if (options.seeds == SeedPolicy::largest_bounds) return refuse("seeds largest_bounds needs the cpu backend; cuda has sample, chain and nearest_spread");
  if (certificate.form == Form::absolute) return refuse("form absolute needs the cpu backend; cuda has base and extended");
  if (certificate.aggregates > 1) return refuse(fmt::format("aggregates is {}; the cuda backend has 1", certificate.aggregates));
  if (certificate.precision != ScreenPrecision::automatic) return refuse("precision is of the cpu backend; cuda screens in fp8");
  const int rows = certificate.row_budget;
  for (int i = 0; rows != 0; ++i) {
    if (i == kBudgetCount) return refuse(fmt::format("row_budget is {}; the cuda backend has 8, 12, 16, 20, 24 and 32", rows));
    if (budget_at(i) == rows) break;
  }
  return std::nullopt;
}

}  // namespace
}  // namespace cuda

std::string cuda_unavailable_reason() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return fmt::format("the cuda backend finds no GPU: {}", cudaGetErrorString(error));
  if (count == 0) return "the cuda backend finds no GPU";
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) return fmt::format("the cuda backend is for compute capability 9.0 (Hopper); the GPU has {}.{}", major, minor);
  return "";
}

Result<std::unique_ptr<BackendImpl>> make_cuda_backend(const Options& options) {
  if (const auto error = cuda::refusal(options)) return tl::unexpected(*error);
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  const cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return cuda::device_error("the GPU cannot be asked", error);
  return std::make_unique<cuda::CudaBackend>(options, multiprocessors);
}

}  // namespace dosa
