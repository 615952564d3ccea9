#include "backend/cuda/tensor_map.hpp"

#include <cudaTypedefs.h>

#include "backend/cuda/stages.hpp"

namespace dosa::cuda {
namespace {

// The driver's own function, asked for at run time: the library must start where there is no driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    constexpr unsigned kVersion = 12000;  // the first with tensor maps
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kVersion, cudaEnableDefault, &result);
    const bool ok = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function) : nullptr;
  }();
  return found;
}

}  // namespace

cudaError_t make_key_map(CUtensorMap& map, const std::uint8_t* k, std::int64_t nk, int box_rows, int period) {
  const auto encode = encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t size[2] = {kDim, static_cast<cuuint64_t>(nk)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(period) * kDim};  // bytes, of dimension 1
  const cuuint32_t box[2] = {kDim, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t step[2] = {1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<std::uint8_t*>(k), size, stride,
                                 box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace dosa::cuda
