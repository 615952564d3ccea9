// CUDA errors in words.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "base/error.hpp"

namespace dosa::cuda {

inline tl::unexpected<Error> device_error(const char* what, cudaError_t error) {
  return fail(ErrorCode::unsupported_device, fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

}  // namespace dosa::cuda
