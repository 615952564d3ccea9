// Problems copied to the device, for programs and tests whose data is in host memory.
#include <algorithm>
#include <cstring>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "backend/backend.hpp"
#include "backend/cuda/errors.hpp"
#include "base/check.hpp"
#include "base/keys.hpp"

namespace dosa {
namespace cuda {
namespace {

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
  cudaError_t load(const Problem& host, bool with_scores, std::int64_t recent_width) {
    cudaError_t error = copy_inputs(host, true);
    if (recent_width > 0) {
      const std::int64_t requests = request_count(host);
      if (error == cudaSuccess) error = recent_.reserve(static_cast<std::size_t>(std::max<std::int64_t>(requests * recent_width, 1)) * 4);
      selection_.recent = dense_view(recent_.data(), DType::i32, {requests, recent_width}, Device::cuda);
      if (error == cudaSuccess) error = clear_recent();
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

  Result<void> replace(const Problem& host, bool keys) override {
    if (const cudaError_t error = copy_inputs(host, keys); error != cudaSuccess) return device_error("a problem could not be copied", error);
    return {};
  }
  Result<void> forget_recent() override {
    if (const cudaError_t error = clear_recent(); error != cudaSuccess) return device_error("recent winners could not be cleared", error);
    return {};
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
      if (error != cudaSuccess || from.shape[0] == 0) return;
      const auto width = static_cast<std::size_t>(from.shape[1]) * sizeof(float);
      error = cudaMemcpy2D(to.data, static_cast<std::size_t>(to.stride[0]) * sizeof(float), from.data, width, width,
                           static_cast<std::size_t>(from.shape[0]), cudaMemcpyDeviceToHost);
    };
    copy(selection_.ids, host.ids);
    if (host.scores.present() && selection_.scores.present()) copy(selection_.scores, host.scores);
    if (error != cudaSuccess) return device_error("the selection could not be copied back", error);
    return {};
  }

 private:
  cudaError_t copy_inputs(const Problem& host, bool keys) {
    const Problem before = problem_;
    problem_ = host;
    cudaError_t error = cudaSuccess;
    TensorView* views[] = {&problem_.q, &problem_.w, &problem_.ks, &problem_.ke, &problem_.hints, &problem_.block_table, &problem_.requests};
    for (std::size_t i = 0; i < std::size(views) && error == cudaSuccess; ++i) {
      if (views[i]->present()) error = upload(*views[i], inputs_[i]);
    }
    if (!keys) {
      problem_.k = before.k;
      problem_.k_scale = before.k_scale;
      problem_.kv_cache = before.kv_cache;
      return error;
    }
    if (error == cudaSuccess && host.k.present()) error = upload(problem_.k, keys_[0]);
    if (error == cudaSuccess && host.k_scale.present()) error = upload(problem_.k_scale, keys_[1]);
    if (error == cudaSuccess && host.kv_cache.present()) error = upload_pages(problem_.kv_cache, keys_[0]);
    return error;
  }

  cudaError_t clear_recent() {
    const MutableTensorView& recent = selection_.recent;
    if (!recent.present()) return cudaSuccess;
    return cudaMemset(recent.data, 0xFF, static_cast<std::size_t>(recent.shape[0] * recent.shape[1]) * sizeof(std::int32_t));
  }

  // From the first page to the end of the last one, with what lies between them.
  static cudaError_t upload_pages(TensorView& view, DeviceBlock& block) {
    if (view.shape[0] == 0) return upload(view, block);
    const auto bytes = static_cast<std::size_t>((view.shape[0] - 1) * view.stride[0] + view.shape[1] * view.shape[3]);
    cudaError_t error = block.reserve(bytes);
    if (error == cudaSuccess) error = cudaMemcpy(block.data(), view.data, bytes, cudaMemcpyHostToDevice);
    view.data = block.data();
    view.device = Device::cuda;
    return error;
  }

  static cudaError_t upload(TensorView& view, DeviceBlock& block) {
    const bool dense = is_dense(view);
    const std::vector<std::byte> bytes = dense ? std::vector<std::byte>() : packed(view);
    std::size_t size = size_of(view.dtype);
    for (int axis = 0; axis < view.rank; ++axis) size *= static_cast<std::size_t>(view.shape[static_cast<std::size_t>(axis)]);
    cudaError_t error = block.reserve(std::max<std::size_t>(size, 1));
    if (error == cudaSuccess) error = cudaMemcpy(block.data(), dense ? view.data : bytes.data(), size, cudaMemcpyHostToDevice);
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
  DeviceBlock inputs_[7], keys_[2], ids_, scores_, recent_, workspace_;
};

}  // namespace
}  // namespace cuda

Result<std::unique_ptr<DeviceCopy>> copy_to_device(const Problem& problem, bool with_scores, std::int64_t recent_width) {
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) return fail(ErrorCode::unsupported_device, reason);
  auto copy = std::make_unique<cuda::CudaCopy>();
  const cudaError_t error = copy->load(problem, with_scores, recent_width);
  if (error != cudaSuccess) return fail(ErrorCode::memory_budget, fmt::format("the problem does not fit the GPU: {}", cudaGetErrorString(error)));
  return copy;
}

}  // namespace dosa
