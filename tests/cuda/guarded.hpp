// Device memory between guards, poisoned, so that tests notice what is written where it should not be, or not written
// at all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/device.hpp"

namespace dosa::test {

inline ::testing::AssertionResult cuda_succeeds(const char* expression, cudaError_t error) {
  if (error == cudaSuccess) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << expression << ": " << cudaGetErrorString(error);
}

#define ASSERT_CUDA(call) ASSERT_PRED_FORMAT1(::dosa::test::cuda_succeeds, call)
#define EXPECT_CUDA(call) EXPECT_PRED_FORMAT1(::dosa::test::cuda_succeeds, call)

/// `count` elements of T between two guards; everything is filled with one poison byte. `offset` moves the first
/// element so many elements away from a 256-byte boundary.
template <typename T>
class GuardedArray {
 public:
  explicit GuardedArray(std::size_t count, std::uint8_t poison = 0xA5, std::size_t offset = 0)
      : count_(count),
        front_(kGuard + offset * sizeof(T)),
        bytes_(front_ + count * sizeof(T) + kGuard),
        poison_(poison) {
    EXPECT_CUDA(cudaMalloc(&base_, bytes_));
    EXPECT_CUDA(cudaMemset(base_, poison, bytes_));
  }
  explicit GuardedArray(const std::vector<T>& host, std::size_t offset = 0) : GuardedArray(host.size(), 0xA5, offset) {
    upload(host);
  }
  GuardedArray(const GuardedArray&) = delete;
  GuardedArray& operator=(const GuardedArray&) = delete;
  ~GuardedArray() { cudaFree(base_); }

  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(static_cast<std::uint8_t*>(base_) + front_); }
  [[nodiscard]] std::size_t size() const { return count_; }

  void upload(const std::vector<T>& host) const {
    EXPECT_CUDA(cudaMemcpy(data(), host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  [[nodiscard]] std::vector<T> download() const {
    std::vector<T> host(count_);
    EXPECT_CUDA(cudaMemcpy(host.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

  /// Both guards still hold the poison.
  [[nodiscard]] bool guards_intact() const {
    std::vector<std::uint8_t> guards(front_ + kGuard);
    EXPECT_CUDA(cudaMemcpy(guards.data(), base_, front_, cudaMemcpyDeviceToHost));
    EXPECT_CUDA(cudaMemcpy(guards.data() + front_, static_cast<std::uint8_t*>(base_) + bytes_ - kGuard, kGuard,
                           cudaMemcpyDeviceToHost));
    return std::all_of(guards.begin(), guards.end(), [&](std::uint8_t byte) { return byte == poison_; });
  }

 private:
  static constexpr std::size_t kGuard = 256;
  void* base_ = nullptr;
  std::size_t count_;
  std::size_t front_;
  std::size_t bytes_;
  std::uint8_t poison_;
};

}  // namespace dosa::test
