// Memory on the device, and the reason to skip a test where there is none.
#pragma once

#include <cstring>
#include <cuda_runtime_api.h>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace dosa::test {

/// Empty on a machine whose first CUDA device can run the kernels.
inline std::string no_device_reason() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) return std::string("no CUDA device: ") + cudaGetErrorString(error);
  int major = 0;
  int minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  if (major == 9 && minor == 0) return "";
  return "the CUDA device has compute capability " + std::to_string(major) + "." + std::to_string(minor) + ", not 9.0";
}

inline int multiprocessors() {
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0);
  return count;
}

/// An array on the device.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : size_(size) {
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, std::max<std::size_t>(size * sizeof(T), 1)), cudaSuccess);
    data_ = static_cast<T*>(data);
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) { upload(host); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void upload(const std::vector<T>& host) {
    EXPECT_EQ(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  [[nodiscard]] std::vector<T> download() const {
    std::vector<T> host(size_);
    EXPECT_EQ(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
  }
  void fill(int byte) { EXPECT_EQ(cudaMemset(data_, byte, size_ * sizeof(T)), cudaSuccess); }
  [[nodiscard]] T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

/// A stream, and a graph of what was enqueued on it.
class CapturedStream {
 public:
  CapturedStream() { EXPECT_EQ(cudaStreamCreate(&stream_), cudaSuccess); }
  ~CapturedStream() {
    cudaGraphExecDestroy(executable_);
    cudaStreamDestroy(stream_);
  }
  CapturedStream(const CapturedStream&) = delete;
  CapturedStream& operator=(const CapturedStream&) = delete;

  [[nodiscard]] cudaStream_t stream() const { return stream_; }

  /// Once.
  template <class Enqueue>
  void capture(const Enqueue& enqueue) {
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    enqueue();
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&executable_, graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
  }
  /// Returns when it is done.
  void replay() {
    ASSERT_EQ(cudaGraphLaunch(executable_, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

/// Skips every test where the kernels cannot run.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = no_device_reason();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

}  // namespace dosa::test
