// Launches that overlap with the end of the kernel before: a few microseconds a step of decoding.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace dosa::cuda {

/// kernel<<<grid, threads, shared_bytes, stream>>>(args...), in clusters of `cluster` CTAs; the kernel begins with
/// ptx::wait_for_previous().
template <class Kernel, class... Args>
cudaError_t launch_early(Kernel* kernel, std::int64_t grid, int threads, std::size_t shared_bytes, int cluster,
                         cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace dosa::cuda
