// The Hopper backend: sizes, the order of a run, and problems copied to the device.
#include <algorithm>
#include <cstring>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "backend/backend.hpp"
#include "backend/cuda/stages.hpp"
#include "base/carve.hpp"
#include "base/error.hpp"

namespace dosa {
namespace cuda {
namespace {

constexpr std::int64_t kKeyAlign = 1024;         // slices of keys start at multiples of this
constexpr std::int64_t kRowAlign = 64;           // rows that fill whole query tiles at any number of heads
constexpr std::int64_t kFewestKeys = 32 * 1024;  // shorter slices starve the chip
constexpr std::size_t kAlignment = 256;

tl::unexpected<Error> device_error(const char* what, cudaError_t error) {
  return fail(ErrorCode::unsupported_device, fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The workspace of a run. Counters come first.
struct Layout {
  Counters* counters;
  float* scores;             // [rows of a slice][keys of a slice]
  Record* kept;              // [rows of a slice][topk]
  std::int32_t* kept_count;  // [rows of a slice]
  std::size_t bytes;

  Layout(const Plan& plan, void* base) {
    Carver carver(base);
    counters = carver.take<Counters>(1);
    scores = carver.take<float>(std::int64_t{plan.tile_queries} * plan.slice_keys);
    kept = carver.take<Record>(std::int64_t{plan.tile_queries} * plan.shape.topk);
    kept_count = carver.take<std::int32_t>(plan.tile_queries);
    bytes = carver.used();
  }
};

class CudaBackend final : public BackendImpl {
 public:
  CudaBackend(const Options& options, int multiprocessors) : options_(options), multiprocessors_(multiprocessors) {}

  [[nodiscard]] Result<Plan> plan(const ProblemShape& shape) const override;
  Result<Stats> run(const Plan& plan, const Problem& problem, const Selection& out, Workspace workspace,
                    std::span<RowReport> reports) const override;
  [[nodiscard]] Result<Stats> counters(const Plan& plan, Workspace workspace) const override;

 private:
  Options options_;
  int multiprocessors_;
};

// Scores of as many rows as the budget holds over all keys; where it holds fewer rows than fill the chip, keys are sliced too.
Result<Plan> CudaBackend::plan(const ProblemShape& shape) const {
  if (shape.dim != kDim) {
    return fail(ErrorCode::unsupported_shape, fmt::format("dim is {}; the sm90 scorer has {}", shape.dim, kDim));
  }
  Plan plan;
  plan.shape = shape;
  plan.options = options_;
  plan.options.method = Method::dense;
  plan.implementation = "sm90a";
  const std::int64_t all_rows = round_up(std::max<std::int64_t>(shape.nq, 1), kRowAlign);
  const std::int64_t all_keys = round_up(std::max<std::int64_t>(shape.nk, 1), kKeyAlign);
  std::int64_t rows = all_rows;
  std::int64_t keys = all_keys;
  while (true) {
    plan.tile_queries = static_cast<std::int32_t>(rows);
    plan.slice_keys = keys;
    plan.workspace_bytes = Layout(plan, nullptr).bytes;
    if (static_cast<std::int64_t>(plan.workspace_bytes) <= options_.memory_budget) return plan;
    if (rows > 4 * kRowAlign || (rows > kRowAlign && keys <= kFewestKeys)) {
      rows = round_up(rows / 2, kRowAlign);
    } else if (keys > kFewestKeys) {
      keys = std::max(kFewestKeys, round_up(keys / 2, kKeyAlign));
    } else {
      return fail(ErrorCode::memory_budget,
                  fmt::format("memory_budget is {} bytes; {} queries over {} keys at topk {} need at least {}",
                              options_.memory_budget, shape.nq, shape.nk, shape.topk, plan.workspace_bytes));
    }
  }
}

template <typename T, typename Void>
T* data_of(const BasicTensorView<Void>& view) {
  return static_cast<T*>(view.data);
}

// What the kernels take for granted about strides.
Result<Inputs> inputs_of(const ProblemShape& shape, const Problem& problem, const Selection& out) {
  const auto dense = [](const auto& view) {
    std::int64_t stride = 1;
    for (int axis = view.rank; axis-- > 0;) {
      if (view.shape[static_cast<std::size_t>(axis)] > 1 && view.stride[static_cast<std::size_t>(axis)] != stride) return false;
      stride *= view.shape[static_cast<std::size_t>(axis)];
    }
    return true;
  };
  const auto refuse = [](const char* name, const char* allowed) {
    return fail(ErrorCode::invalid_argument, fmt::format("{} is not {}, as the cuda backend needs it", name, allowed));
  };
  if (!dense(problem.q)) return refuse("q", "contiguous");
  if (!dense(problem.k)) return refuse("k", "contiguous");
  if (!dense(problem.k_scale)) return refuse("k_scale", "contiguous");
  if (problem.ks.present() && !dense(problem.ks)) return refuse("ks", "contiguous");
  if (problem.ke.present() && !dense(problem.ke)) return refuse("ke", "contiguous");
  if (shape.heads > 1 && problem.w.stride[1] != 1) return refuse("w", "contiguous along heads");
  if (shape.topk > 1 && out.ids.stride[1] != 1) return refuse("ids", "contiguous along a row");
  if (shape.topk > 1 && out.scores.present() && out.scores.stride[1] != 1) return refuse("scores", "contiguous along a row");
  for (const TensorView* view : {&problem.q, &problem.k}) {
    if (reinterpret_cast<std::uintptr_t>(view->data) % 16 != 0) return refuse(view == &problem.q ? "q" : "k", "aligned to 16 bytes");
  }
  return Inputs{.q = data_of<const std::uint8_t>(problem.q),
                .k = data_of<const std::uint8_t>(problem.k),
                .k_scale = data_of<const float>(problem.k_scale),
                .w = data_of<const float>(problem.w),
                .ks = problem.ks.present() ? data_of<const std::int32_t>(problem.ks) : nullptr,
                .ke = problem.ke.present() ? data_of<const std::int32_t>(problem.ke) : nullptr,
                .w_stride = problem.w.stride[0],
                .nq = shape.nq,
                .nk = shape.nk,
                .heads = shape.heads};
}

Result<Stats> CudaBackend::run(const Plan& plan, const Problem& problem, const Selection& out, Workspace workspace,
                               std::span<RowReport> reports) const {
  if (!reports.empty()) return fail(ErrorCode::invalid_argument, "the cuda backend makes no row reports");
  const auto inputs = inputs_of(plan.shape, problem, out);
  if (!inputs) return tl::unexpected(inputs.error());
  const Inputs& in = *inputs;
  const auto stream = static_cast<cudaStream_t>(workspace.stream);
  const Layout layout(plan, workspace.data);
  Stats stats;
  stats.rows = in.nq;

  cudaError_t error = launch_count(in, plan.shape.topk, layout.counters, stream);
  for (std::int64_t row = 0; row < in.nq && error == cudaSuccess; row += plan.tile_queries) {
    const std::int64_t rows = std::min<std::int64_t>(plan.tile_queries, in.nq - row);
    // At least one slice, so that kept counts are set where there are no keys.
    for (std::int64_t key = 0; key == 0 || key < in.nk; key += plan.slice_keys) {
      const std::int64_t key_end = std::min(in.nk, key + plan.slice_keys);
      const ScoreArgs score{in, row, rows, key, key_end, layout.scores, plan.slice_keys};
      if (key_end > key && error == cudaSuccess) error = launch_score(score, multiprocessors_, stream);
      const SelectScoresArgs select{in,          row,           rows, key,         key_end, layout.scores, plan.slice_keys,
                                    plan.shape.topk, key == 0, layout.kept, layout.kept_count};
      if (error == cudaSuccess) error = launch_select_scores(select, multiprocessors_, stream);
    }
    const WriteArgs write{in,
                          row,
                          rows,
                          plan.shape.topk,
                          plan.options.order == Order::ascending,
                          plan.options.index_space == IndexSpace::relative,
                          layout.kept,
                          layout.kept_count,
                          data_of<std::int32_t>(out.ids),
                          out.ids.stride[0],
                          out.scores.present() ? data_of<float>(out.scores) : nullptr,
                          out.scores.present() ? out.scores.stride[0] : 0};
    if (error == cudaSuccess) error = launch_write(write, stream);
  }
  if (error != cudaSuccess) return device_error("a kernel could not be launched", error);
  return stats;
}

Result<Stats> CudaBackend::counters(const Plan& plan, Workspace workspace) const {
  const auto stream = static_cast<cudaStream_t>(workspace.stream);
  Counters counted{};
  cudaError_t error = cudaMemcpyAsync(&counted, workspace.data, sizeof(Counters), cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return device_error("counters could not be read", error);
  Stats stats;
  stats.rows = plan.shape.nq;
  stats.clamped_rows = static_cast<std::int64_t>(counted.clamped_rows);
  stats.path.empty = static_cast<std::int64_t>(counted.empty);
  stats.path.short_rows = static_cast<std::int64_t>(counted.short_rows);
  stats.path.full = static_cast<std::int64_t>(counted.full);
  stats.visible = stats.full = static_cast<std::int64_t>(counted.visible);
  return stats;
}

// --- Problems copied to the device -----------------------------------------------------------------------------------------

class DeviceBlock {
 public:
  DeviceBlock() = default;
  DeviceBlock(const DeviceBlock&) = delete;
  DeviceBlock& operator=(const DeviceBlock&) = delete;
  ~DeviceBlock() { cudaFree(data_); }

  cudaError_t reserve(std::size_t bytes) {
    if (bytes <= bytes_) return cudaSuccess;
    cudaFree(data_);
    data_ = nullptr;
    bytes_ = 0;
    const cudaError_t error = cudaMalloc(&data_, bytes);
    if (error == cudaSuccess) bytes_ = bytes;
    return error;
  }
  [[nodiscard]] void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Row-major bytes of a host view.
std::vector<std::byte> packed(const TensorView& view) {
  const std::size_t size = size_of(view.dtype);
  std::int64_t count = 1;
  for (int axis = 0; axis < view.rank; ++axis) count *= view.shape[static_cast<std::size_t>(axis)];
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size);
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t offset = 0;
    std::int64_t rest = i;
    for (int axis = view.rank; axis-- > 0;) {
      const auto a = static_cast<std::size_t>(axis);
      offset += rest % view.shape[a] * view.stride[a];
      rest /= view.shape[a];
    }
    std::memcpy(bytes.data() + static_cast<std::size_t>(i) * size,
                static_cast<const std::byte*>(view.data) + offset * static_cast<std::int64_t>(size), size);
  }
  return bytes;
}

class CudaCopy final : public DeviceCopy {
 public:
  cudaError_t load(const Problem& host, bool with_scores) {
    problem_ = host;
    cudaError_t error = cudaSuccess;
    TensorView* views[] = {&problem_.q, &problem_.k, &problem_.k_scale, &problem_.w, &problem_.ks, &problem_.ke, &problem_.hints};
    for (std::size_t i = 0; i < std::size(views) && error == cudaSuccess; ++i) {
      if (views[i]->present()) error = upload(*views[i], inputs_[i]);
    }
    const std::int64_t nq = host.q.shape[0];
    const std::int64_t k = host.topk;
    const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(nq * k, 1) * 4);
    if (error == cudaSuccess) error = ids_.reserve(bytes);
    selection_.ids = dense_view(ids_.data(), DType::i32, {nq, k}, Device::cuda);
    if (with_scores) {
      if (error == cudaSuccess) error = scores_.reserve(bytes);
      selection_.scores = dense_view(scores_.data(), DType::f32, {nq, k}, Device::cuda);
    }
    return error;
  }

  [[nodiscard]] const Problem& problem() const override { return problem_; }
  [[nodiscard]] const Selection& selection() const override { return selection_; }

  Result<Workspace> workspace(std::size_t bytes) override {
    const cudaError_t error = workspace_.reserve(bytes);
    if (error != cudaSuccess) {
      return fail(ErrorCode::memory_budget, fmt::format("{} bytes of device memory: {}", bytes, cudaGetErrorString(error)));
    }
    return Workspace{workspace_.data(), bytes};
  }

  Result<void> fetch(const Selection& host) override {
    cudaError_t error = cudaDeviceSynchronize();
    const auto copy = [&](const MutableTensorView& from, const MutableTensorView& to) {
      for (std::int64_t row = 0; row < from.shape[0] && error == cudaSuccess; ++row) {
        error = cudaMemcpy(to.at<std::uint32_t>(row), from.at<std::uint32_t>(row), static_cast<std::size_t>(from.shape[1]) * 4,
                           cudaMemcpyDeviceToHost);
      }
    };
    copy(selection_.ids, host.ids);
    if (host.scores.present() && selection_.scores.present()) copy(selection_.scores, host.scores);
    if (error != cudaSuccess) return device_error("the selection could not be copied back", error);
    return {};
  }

 private:
  static cudaError_t upload(TensorView& view, DeviceBlock& block) {
    const std::vector<std::byte> bytes = packed(view);
    cudaError_t error = block.reserve(std::max<std::size_t>(bytes.size(), 1));
    if (error == cudaSuccess) error = cudaMemcpy(block.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
    std::int64_t stride = 1;
    for (int axis = view.rank; axis-- > 0;) {
      view.stride[static_cast<std::size_t>(axis)] = stride;
      stride *= view.shape[static_cast<std::size_t>(axis)];
    }
    view.data = block.data();
    view.device = Device::cuda;
    return error;
  }

  Problem problem_;
  Selection selection_;
  DeviceBlock inputs_[7], ids_, scores_, workspace_;
};

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
  if (options.method != Method::dense && options.method != Method::automatic) {
    return fail(ErrorCode::unsupported_device, "the cuda backend has method dense so far");
  }
  if (options.verify_rows != 0) return fail(ErrorCode::invalid_argument, "verify_rows needs the cpu backend, which waits for its results");
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  const cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return cuda::device_error("the GPU cannot be asked", error);
  return std::make_unique<cuda::CudaBackend>(options, multiprocessors);
}

Result<std::unique_ptr<DeviceCopy>> copy_to_device(const Problem& problem, bool with_scores) {
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) return fail(ErrorCode::unsupported_device, reason);
  auto copy = std::make_unique<cuda::CudaCopy>();
  const cudaError_t error = copy->load(problem, with_scores);
  if (error != cudaSuccess) return fail(ErrorCode::memory_budget, fmt::format("the problem does not fit the GPU: {}", cudaGetErrorString(error)));
  return copy;
}

}  // namespace dosa
